//! Many connections to a server of `ucmatose`, from rdmacm-utils.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::future::try_join_all;
use tokio_rdma::cm::{self, CmConnection, ConnectConfig, ConnectError};
use tokio_rdma::op::{Recv, RetryConfig};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{
    BufMut, CompletionMode, CompletionQueue, Device, Pool, ProtectionDomain, QueuePair,
};

/// Long enough for hundreds of queue pairs in an emulated machine.
const PATIENCE: Duration = Duration::from_secs(150);

struct Client {
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
    server: SocketAddr,
    messages: u32,
    size: usize,
}

impl Client {
    fn new(ours: IpAddr, server: SocketAddr, [connections, messages, size]: [u32; 3]) -> Self {
        let network = Network::udp(&UdpConfig::new().device("one", ours).expose()).unwrap();
        let device = Device::software_in(&network, "one").unwrap();
        let pd = device.protection_domain().unwrap();
        let capacity = connections * (messages + 1) * 2;
        let queue = CompletionQueue::builder(&device)
            .capacity(capacity)
            .mode(CompletionMode::Event)
            .build()
            .unwrap();
        let buffers = (connections * (messages + 1)) as usize;
        let pool = Pool::new(&pd, size as usize, buffers).unwrap();
        Self { device, pd, queue, pool, server, messages, size: size as usize }
    }

    /// Connects with receives posted, since the server sends at once.
    async fn connect(&self) -> Result<(CmConnection, QueuePair, Vec<Recv<BufMut>>), ConnectError> {
        let transport =
            RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() };
        let options = ConnectConfig::default().timeout(PATIENCE).retries(transport);
        let route = cm::resolve_with(&self.device, self.server, &options).await?;
        let entries = self.messages + 1;
        let builder =
            QueuePair::builder(&self.pd, &self.queue).max_send_wr(entries).max_recv_wr(entries);
        let qp = route.prepare(builder).build().unwrap();
        let mut receives = Vec::new();
        for _ in 0..self.messages {
            receives.push(qp.recv(self.pool.alloc(self.size).await.unwrap()));
        }
        Ok((route.connect(&qp, &options).await?, qp, receives))
    }
}

/// Runs only within scripts/wire-interop. `TOKIO_RDMA_UCMATOSE` holds the server's address, the
/// address of a software device, and the server's values of -c, -C and -S.
#[test]
fn ucmatose_serves_many_connections() {
    let Ok(setting) = std::env::var("TOKIO_RDMA_UCMATOSE") else { return };
    let [server, ours, connections, messages, size] = setting.split(' ').collect::<Vec<_>>()[..]
    else {
        panic!("{setting}")
    };
    let number = |text: &str| text.parse::<u32>().unwrap();
    let counts = [number(connections), number(messages), number(size)];
    super::runtime().block_on(async {
        let client = Client::new(ours.parse().unwrap(), server.parse().unwrap(), counts);
        let work = async {
            let all = try_join_all((0..counts[0]).map(|_| client.connect())).await.unwrap();
            println!("{} connections", all.len());
            let (ends, receives): (Vec<_>, Vec<_>) =
                all.into_iter().map(|(link, qp, receives)| ((link, qp), receives)).unzip();
            for receive in receives.into_iter().flatten() {
                assert_eq!(receive.await.unwrap().len, client.size);
            }
            println!("{messages} messages of {size} bytes by each received");
            try_join_all(ends.iter().flat_map(|(_, qp)| {
                (0..counts[1])
                    .map(|_| async { qp.send(client.pool.alloc(client.size).await.unwrap()).await })
            }))
            .await
            .unwrap();
            println!("as many sent");
            for (link, _) in &ends {
                link.disconnected().await;
            }
        };
        tokio::time::timeout(PATIENCE * 2, work).await.expect("hangs");
    });
}
