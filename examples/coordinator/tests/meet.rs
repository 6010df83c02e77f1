//! Tests of the service and its nodes, in one process.

use std::net::Ipv4Addr;
use std::time::Duration;

use coordinator::Announcement;
use coordinator::node::Node;
use coordinator::service;
use tokio::net::TcpListener;
use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, QueuePair};

async fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, service::router()).await });
    url
}

fn node(name: &str, peer: &str, service: &str) -> Node {
    Node { name: name.to_owned(), peer: peer.to_owned(), service: service.to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_write_into_each_other() {
    let url = serve().await;
    let device = Device::open_default_or_software().unwrap();
    let (a, b) = (node("a", "b", &url), node("b", "a", &url));
    let (of_a, of_b) = tokio::join!(a.run(&device), b.run(&device));
    assert_eq!(of_a.unwrap(), "b was here");
    assert_eq!(of_b.unwrap(), "a was here");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_with_udp_devices_connect() {
    let url = serve().await;
    let device = || Device::open_default_towards(Ipv4Addr::LOCALHOST.into()).unwrap();
    let devices = [device(), device()];
    let (a, b) = (node("a", "b", &url), node("b", "a", &url));
    let (of_a, of_b) = tokio::join!(a.run(&devices[0]), b.run(&devices[1]));
    assert_eq!(of_a.unwrap(), "b was here");
    assert_eq!(of_b.unwrap(), "a was here");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pairs_connect_at_once() {
    let url = serve().await;
    let device = Device::open_default_or_software().unwrap();
    let mut meetings = tokio::task::JoinSet::new();
    for pair in 0..16 {
        for (ours, theirs) in [("a", "b"), ("b", "a")] {
            let node = node(&format!("{ours}{pair}"), &format!("{theirs}{pair}"), &url);
            let device = device.clone();
            meetings
                .spawn(async move { (node.run(&device).await, format!("{} was here", node.peer)) });
        }
    }
    while let Some(meeting) = meetings.join_next().await {
        let (found, expected) = meeting.unwrap();
        assert_eq!(found.unwrap(), expected);
    }
}

#[tokio::test]
async fn service_refuses_malformed_announcements() {
    let url = format!("{}/nodes/a/rdma/endpoint", serve().await);
    let client = reqwest::Client::new();
    assert_eq!(client.get(&url).send().await.unwrap().status(), 404);
    for body in ["", "{}", "[]", r#"{"endpoint":{"transport":"RC"},"region":{}}"#] {
        let sent = client
            .post(&url)
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .unwrap();
        assert!(sent.status().is_client_error(), "{body}: {}", sent.status());
    }
    let long = "x".repeat(8192);
    let sent = client
        .post(&url)
        .header("content-type", "application/json")
        .body(long)
        .send()
        .await
        .unwrap();
    assert_eq!(sent.status(), 413);

    let ours = announcement();
    let mut json = serde_json_of(&ours);
    assert_eq!(client.post(&url).json(&ours).send().await.unwrap().status(), 201);
    assert_eq!(client.post(&url).json(&ours).send().await.unwrap().status(), 200);
    let found: Announcement = client.get(&url).send().await.unwrap().json().await.unwrap();
    assert_eq!(found, ours);
    // A field out of range is refused by name.
    json = json.replace(&format!("\"qpn\":{}", ours.endpoint.qpn.0), "\"qpn\":1");
    let sent = client
        .post(&url)
        .header("content-type", "application/json")
        .body(json)
        .send()
        .await
        .unwrap();
    assert!(sent.status().is_client_error());
    assert!(sent.text().await.unwrap().contains("queue pair number"));
    assert_eq!(client.get(&url).send().await.unwrap().json::<Announcement>().await.unwrap(), ours);
}

#[tokio::test]
async fn waiting_request_receives_the_announcement() {
    let url = serve().await;
    let client = reqwest::Client::new();
    let at = format!("{url}/nodes/late/rdma/endpoint");
    let waiting = tokio::spawn(client.get(format!("{at}?wait=20")).send());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    assert_eq!(client.post(&at).json(&announcement()).send().await.unwrap().status(), 201);
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    assert_eq!(
        client
            .get(format!("{url}/nodes/never/rdma/endpoint?wait=1"))
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
}

fn announcement() -> Announcement {
    let device = Device::open_default_or_software().unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_READ).unwrap();
    Announcement {
        endpoint: QueuePair::new(&pd, &queue).unwrap().endpoint(),
        region: region.grant(),
    }
}

fn serde_json_of(announcement: &Announcement) -> String {
    let request =
        reqwest::Client::new().post("http://localhost").json(announcement).build().unwrap();
    String::from_utf8(request.body().unwrap().as_bytes().unwrap().to_vec()).unwrap()
}
