//! The owner, which lends memory.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_rdma::error::OutOfBounds;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{Access, Connection, Device, EstablishError, ExposedRegion, Listener};

use crate::node::connection;
use crate::{Conflict, Content, Directory, DirectoryError, Instance, PAGE, Share, StartError};

/// Maximum number of clients; others wait until one disconnects.
const MAX_CLIENTS: usize = 64;

/// Configuration of an owner.
#[derive(Debug, Clone)]
pub struct OwnerConfig {
    /// Name at the coordinator.
    pub name: String,
    /// Address to listen at; port 0: a free one.
    pub address: SocketAddr,
    /// Number of the first page.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
    /// Number of the copy.
    pub replica: u32,
    /// Initial content.
    pub content: Content,
}

/// Lends memory until it is dropped. Clients read and write the pages without its involvement.
#[derive(Debug)]
pub struct Owner {
    name: String,
    share: Share,
    /// The coordinator that it joined.
    instance: Instance,
    region: Arc<ExposedRegion>,
    /// Aborted on drop.
    #[expect(dead_code, reason = "held")]
    serving: JoinSet<()>,
}

impl Owner {
    /// Fills the pages, listens, and joins the coordinator's map.
    ///
    /// # Errors
    ///
    /// [`StartError`]: no memory, or the device, the address or the coordinator is unavailable.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with I/O and time drivers.
    pub async fn start(
        device: &Device,
        directory: &Directory,
        config: &OwnerConfig,
    ) -> Result<Self, StartError> {
        // One protection domain for all clients, since they share the region and its key.
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
        let filled: Result<(), OutOfBounds> = tokio::task::spawn_blocking(fill)
            .await
            .map_err(|error| StartError::Fill(error.into()))?;
        filled.map_err(|error| StartError::Fill(std::io::Error::other(error)))?;
        let listener = Listener::bind_with(device, config.address, &connection(&pd)).await?;
        let (address, replica) = (listener.local_addr()?, config.replica);
        let share = Share { address, first, region: region.grant(), replica };
        // Serve before joining, so that the first client finds the listener ready.
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener));
        let instance = directory.join(&config.name, &share, None).await?;
        Ok(Self { name: config.name.clone(), share, instance, region, serving })
    }

    /// Asks the coordinator whether the pages are on its map.
    ///
    /// Once they are not, they cannot return: a client may have removed them to write without them,
    /// and a restarted coordinator has no record. Clients that have them may continue; for others,
    /// restart the owner.
    ///
    /// # Errors
    ///
    /// [`Conflict::Stale`](crate::Conflict::Stale) if they are not on the map; others if the
    /// coordinator is unreachable.
    pub async fn confirm(&self, directory: &Directory) -> Result<(), DirectoryError> {
        directory.join(&self.name, &self.share, Some(self.instance)).await.map(drop)
    }

    /// Returns the pages it lends.
    #[must_use]
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// Copies a page, to which clients may be writing.
    ///
    /// # Errors
    ///
    /// If the page is not this owner's.
    pub fn page(&self, page: u64) -> Result<[u8; PAGE], OutOfBounds> {
        let mut bytes = [0; PAGE];
        let at = page.wrapping_sub(self.share.first).saturating_mul(PAGE as u64);
        self.region.read(usize::try_from(at).unwrap_or(usize::MAX), &mut bytes)?;
        Ok(bytes)
    }

    /// Removes the pages from the map and closes the connections.
    ///
    /// # Errors
    ///
    /// If the coordinator is unreachable.
    pub async fn leave(self, directory: &Directory) -> Result<(), DirectoryError> {
        match directory.leave(&self.name, self.instance).await {
            // Another coordinator, whose map has never had these pages.
            Err(DirectoryError::Conflict(Conflict::Instance { .. })) => Ok(()),
            left => left,
        }
    }
}

/// Allocates zeroed memory, in huge pages if available: the adapter then has fewer translations.
fn memory(pages: u64) -> Result<HostMemory, StartError> {
    let bytes = pages.saturating_mul(PAGE as u64);
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    HostMemory::huge(len).map_err(|cause| StartError::Memory { bytes, cause })
}

/// Accepts clients and holds their connections until they close.
async fn serve(listener: Listener) {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            connection = listener.accept(), if clients.len() < MAX_CLIENTS => match connection {
                Ok(connection) => drop(clients.spawn(hold(connection))),
                Err(EstablishError::Setup(error)) => {
                    eprintln!("failed to set up a client's connection: {error}");
                }
                Err(error) => {
                    eprintln!("no longer accepting clients: {error}");
                    break;
                }
            },
            Some(_) = clients.join_next() => {}
        }
    }
    clients.join_all().await;
}

async fn hold(connection: Connection) {
    // Messages are ignored; receiving detects the end of the connection.
    while let Ok(Some(_)) = connection.recv().await {}
}
