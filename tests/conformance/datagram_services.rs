//! Services of datagrams that clients find by address.

use std::net::SocketAddr;

use tokio_rdma::cm::{
    ConnectConfig, ConnectError, DatagramListener, DatagramPeer, RejectReason, resolve_datagrams,
};
use tokio_rdma::error::SetupError;
use tokio_rdma::types::{Qkey, Transport};
use tokio_rdma::{QueuePair, op::QueuePairBuilder};

use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, in_every_mode, skip_on_emulated_device, within};

in_every_mode! {
    clients_find_the_queue_pair_and_exchange_datagrams,
    absent_and_refusing_services_are_told_apart,
    queue_pair_that_cannot_serve_is_refused,
}

const NO_MANAGER: &str = "librdmacm does not know it";

fn pair(mode: &str) -> Pair {
    let build = |builder: QueuePairBuilder| builder.qkey(Qkey::RDMA_UDP);
    Pair::shaped(Setup::new(), &Shape { build: &build, ..Shape::new(Transport::Ud, mode) })
}

/// Serves datagrams at a free port of `b`.
async fn serve(pair: &Pair) -> DatagramListener {
    let ip = pair.b.qp.endpoint().gid.to_ip();
    DatagramListener::bind(&pair.setup.b, SocketAddr::new(ip, 0)).await.unwrap()
}

/// Asks for the service with `question` as private data.
async fn ask(
    pair: &Pair,
    address: SocketAddr,
    question: &[u8],
) -> Result<DatagramPeer, ConnectError> {
    let config = ConnectConfig::default().private_data(question);
    within("an answer", resolve_datagrams(&pair.setup.a, address, &config)).await
}

async fn answer(
    listener: &DatagramListener,
    qp: &QueuePair,
    data: &[u8],
) -> Result<(), ConnectError> {
    let request = within("a request", listener.accept()).await.unwrap();
    assert_eq!(request.local_addr().port(), listener.local_addr().port());
    request.accept(qp, data)
}

async fn clients_find_the_queue_pair_and_exchange_datagrams(mode: &str) {
    if skip_on_emulated_device("clients_find_the_queue_pair_and_exchange_datagrams", NO_MANAGER) {
        return;
    }
    let pair = pair(mode);
    let listener = serve(&pair).await;
    let address = listener.local_addr();
    let Pair { a, b, .. } = &pair;
    for round in 0..3_u8 {
        let server = async {
            let request = within("a request", listener.accept()).await.unwrap();
            assert_eq!(request.private_data()[..180], [round; 180]);
            assert_eq!(request.peer_addr().ip(), a.qp.endpoint().gid.to_ip());
            request.accept(&b.qp, &[round + 1; 136]).unwrap();
        };
        let question = [round; 180];
        let (peer, ()) = tokio::join!(ask(&pair, address, &question), server);
        let peer = peer.unwrap();
        assert_eq!((peer.qpn(), peer.qkey()), (b.qp.qpn(), Qkey::RDMA_UDP));
        assert_eq!(peer.private_data(), [round + 1; 136]);
        let received = b.qp.recv(b.blank(100));
        let route = peer.address_handle(&a.pd).unwrap();
        a.qp.send_to(a.buffer(b"question"), &route, peer.qpn(), peer.qkey()).await.unwrap();
        let sender = within("a datagram", received).await.unwrap().sender().unwrap();
        assert_eq!(sender.qpn, a.qp.qpn());
        let answered = a.qp.recv(a.blank(100));
        let back = sender.address_handle(&b.pd).unwrap();
        b.qp.send_to(b.buffer(b"answer"), &back, sender.qpn, peer.qkey()).await.unwrap();
        assert_eq!(within("the answer", answered).await.unwrap().buffer[40..], *b"answer");
    }
    // Several clients at once.
    let all = futures::future::join_all((0..8).map(|_| ask(&pair, address, b"")));
    let server = async {
        for _ in 0..8 {
            answer(&listener, &b.qp, b"").await.unwrap();
        }
    };
    let (found, ()) = tokio::join!(all, server);
    assert!(found.into_iter().all(|peer| peer.unwrap().qpn() == b.qp.qpn()));
}

async fn absent_and_refusing_services_are_told_apart(mode: &str) {
    if skip_on_emulated_device("absent_and_refusing_services_are_told_apart", NO_MANAGER) {
        return;
    }
    let pair = pair(mode);
    let listener = serve(&pair).await;
    let address = listener.local_addr();
    let refusing = async { drop(within("a request", listener.accept()).await.unwrap()) };
    let (refused, ()) = tokio::join!(ask(&pair, address, b""), refusing);
    let expected = RejectReason::CONSUMER;
    assert!(
        matches!(&refused, Err(ConnectError::Rejected { reason, .. }) if *reason == expected),
        "{refused:?}"
    );
    drop(listener);
    let absent = ask(&pair, address, b"").await;
    assert!(matches!(absent, Err(ConnectError::Refused { .. })), "{absent:?}");
    let too_long = ask(&pair, address, &[0; 181]).await;
    assert!(matches!(too_long, Err(ConnectError::Limit(_))), "{too_long:?}");
}

async fn queue_pair_that_cannot_serve_is_refused(mode: &str) {
    if skip_on_emulated_device("queue_pair_that_cannot_serve_is_refused", NO_MANAGER) {
        return;
    }
    let pair = pair(mode);
    let listener = serve(&pair).await;
    let address = listener.local_addr();
    let other_key = Pair::shaped(Setup::new(), &Shape::new(Transport::Ud, mode));
    let reliable = QueuePair::new(&pair.b.pd, &pair.b.queue).unwrap();
    let keyed = QueuePair::builder(&pair.b.pd, &pair.b.queue).transport(Transport::Ud);
    let keyed = keyed.qkey(Qkey(7)).build().unwrap();
    for (qp, what) in [
        (&reliable, "transports of the queue pair and the connection manager"),
        (&keyed, "Q_Keys of the queue pair and the connection manager (use Qkey::RDMA_UDP)"),
    ] {
        let (client, served) =
            tokio::join!(ask(&pair, address, b""), answer(&listener, qp, b"here"));
        assert!(matches!(client, Err(ConnectError::Rejected { .. })), "{client:?}");
        let Err(ConnectError::Setup { error, .. }) = served else { panic!("{served:?}") };
        assert!(
            matches!(*error, SetupError::Mismatch { what: found, .. } if found == what),
            "{error}"
        );
    }
    let (client, served) =
        tokio::join!(ask(&pair, address, b""), answer(&listener, &other_key.b.qp, b""));
    assert!(client.is_err());
    let Err(ConnectError::Setup { error, .. }) = served else { panic!("{served:?}") };
    assert!(matches!(*error, SetupError::Foreign { .. }), "{error}");
}
