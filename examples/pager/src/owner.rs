//! The end that lends.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_rdma::error::OutOfBounds;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{Access, Connection, Device, EstablishError, ExposedRegion, Listener};

use crate::node::connection;
use crate::{Conflict, Content, Directory, DirectoryError, Instance, PAGE, Share, StartError};

/// Clients that are served at once; others wait for one of them to leave.
const MOST_CLIENTS: usize = 64;

/// What an owner lends.
#[derive(Debug, Clone)]
pub struct OwnerConfig {
    /// Its name at the coordinator.
    pub name: String,
    /// Where to listen; port 0: one that is free.
    pub address: SocketAddr,
    /// Number of the first page.
    pub first: u64,
    /// Pages.
    pub pages: u64,
    /// Which copy of them this is.
    pub replica: u32,
    /// What they hold at first.
    pub content: Content,
}

/// Lends memory until it is dropped. Nothing here looks at the pages: clients read and write them by themselves.
#[derive(Debug)]
pub struct Owner {
    name: String,
    share: Share,
    /// Of the coordinator that it has joined.
    instance: Instance,
    region: Arc<ExposedRegion>,
    /// Ends when it is dropped.
    #[expect(dead_code, reason = "held")]
    serving: JoinSet<()>,
}

impl Owner {
    /// Fills the pages, listens, and registers with the coordinator.
    ///
    /// # Errors
    ///
    /// [`StartError`]: no memory, or the device, the address or the coordinator is not to be had.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O and time drivers.
    pub async fn start(
        device: &Device,
        directory: &Directory,
        config: &OwnerConfig,
    ) -> Result<Self, StartError> {
        // Of all clients: the memory is one, and so is its key.
        let pd = device.protection_domain()?;
        let region = Arc::new(ExposedRegion::new(
            &pd,
            memory(config.pages)?,
            Access::REMOTE_READ | Access::REMOTE_WRITE,
        )?);
        let (filled, content, first) = (region.clone(), config.content, config.first);
        let fill = move || {
            (0..filled.len()).step_by(PAGE).try_for_each(|at| {
                let page = first + (at / PAGE) as u64;
                filled.write(at, &content.of(page, 0))
            })
        };
        let filled: Result<(), OutOfBounds> =
            tokio::task::spawn_blocking(fill).await.map_err(std::io::Error::from)?;
        filled.map_err(std::io::Error::other)?;
        let listener = Listener::bind_with(device, config.address, &connection(&pd)).await?;
        let (address, replica) = (listener.local_addr(), config.replica);
        let share = Share { address, first, region: region.grant(), replica };
        // Before anybody knows of us: who comes finds us listening.
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener));
        let instance = directory.join(&config.name, &share, None).await?;
        Ok(Self { name: config.name.clone(), share, instance, region, serving })
    }

    /// Asks the coordinator whether these pages are on its map. Once they are not, they never will be again: whoever has taken them
    /// off may have written without them, and a coordinator that was started anew cannot know. Clients that have them may go on;
    /// for others the owner is started anew.
    ///
    /// # Errors
    ///
    /// [`Conflict::Stale`](crate::Conflict::Stale) if not, others if the coordinator is not there.
    pub async fn confirm(&self, directory: &Directory) -> Result<(), DirectoryError> {
        directory.join(&self.name, &self.share, Some(self.instance)).await.map(drop)
    }

    /// What it lends.
    #[must_use]
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// Copies a page as it is now, which clients may be writing to.
    ///
    /// # Errors
    ///
    /// If it is none of this owner's.
    pub fn page(&self, page: u64) -> Result<[u8; PAGE], OutOfBounds> {
        let mut bytes = [0; PAGE];
        let at = page.wrapping_sub(self.share.first).saturating_mul(PAGE as u64);
        self.region.read(usize::try_from(at).unwrap_or(usize::MAX), &mut bytes)?;
        Ok(bytes)
    }

    /// Leaves: the coordinator is told, and connections end.
    ///
    /// # Errors
    ///
    /// If the coordinator is not there.
    pub async fn leave(self, directory: &Directory) -> Result<(), DirectoryError> {
        match directory.leave(&self.name, self.instance).await {
            // Its map has never had these pages.
            Err(DirectoryError::Conflict(Conflict::Instance { .. })) => Ok(()),
            left => left,
        }
    }
}

/// Zeroed pages, huge ones if there are: the adapter has fewer addresses to keep then.
fn memory(pages: u64) -> Result<HostMemory, StartError> {
    let bytes = pages.saturating_mul(PAGE as u64);
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    HostMemory::huge(len).map_err(|cause| StartError::Memory { bytes, cause })
}

/// Takes clients, and holds their connections until they end.
async fn serve(listener: Listener) {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            connection = listener.accept(), if clients.len() < MOST_CLIENTS => match connection {
                Ok(connection) => drop(clients.spawn(hold(connection))),
                // For this one.
                Err(EstablishError::Setup(error)) => eprintln!("no room for a client: {error}"),
                Err(error) => {
                    eprintln!("no more clients: {error}");
                    break;
                }
            },
            Some(_) = clients.join_next() => {}
        }
    }
    clients.join_all().await;
}

async fn hold(connection: Connection) {
    // Pages need no messages: whatever comes is not meant for us.
    while let Ok(Some(_)) = connection.recv().await {}
}
