//! Default devices of services and of their clients: addresses, and errors of opening.
//!
//! The tests are skipped, with a message, if SoftRoCE uses the port or `TOKIO_RDMA_DEVICE` names a
//! real device.

use crate::common::{skipped, udp};
use crate::torture::HANG;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::process::Command;

use tokio_rdma::error::OpenError;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{UdpConfig, UdpError};
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Connection, Device, ExposedRegion, Listener,
    OpErrorKind, Pool, QueuePair,
};

/// Returns whether software devices over UDP are available, and prints why not.
fn runs() -> bool {
    if let Some(name) =
        std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE)
    {
        skipped(&format!("default_device: TOKIO_RDMA_DEVICE names {name}"));
        return false;
    }
    match Device::open_default_at(udp::address()) {
        Err(OpenError::Udp(error @ UdpError::PortTaken { soft_roce: true, .. })) => {
            skipped(&format!("default_device: {error}"));
            false
        }
        _ => true,
    }
}

fn somewhere() -> (Device, IpAddr) {
    for _ in 0..100 {
        let address = udp::address();
        match Device::open_default_at(address) {
            Ok(device) => return (device, address),
            Err(OpenError::Udp(UdpError::PortTaken { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no address of 100 is free");
}

fn address_of(device: &Device) -> IpAddr {
    device.default_path().unwrap().1.gid.to_ip()
}

#[track_caller]
fn refused(opened: Result<Device, OpenError>) -> UdpError {
    match opened {
        Err(OpenError::Udp(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn device_holds_its_address_exclusively_until_dropped() {
    if !runs() {
        return;
    }
    let (device, address) = somewhere();
    assert_eq!((address_of(&device), device.name()), (address, &*address.to_string()));
    let name = Some(device.name().to_owned());
    let taken =
        UdpError::PortTaken { address, port: UdpConfig::PORT, soft_roce: false, device: name };
    assert!(taken.to_string().contains("of this process"), "{taken}");
    assert_eq!(refused(Device::open_default_at(address)), taken);
    assert_eq!(io::Error::from(taken).kind(), io::ErrorKind::AddrInUse);
    let pd = device.protection_domain().unwrap();
    drop(device);
    refused(Device::open_default_at(address));
    drop(pd);
    let IpAddr::V4(v4) = address else { panic!("{address}") };
    let again = Device::open_default_at(v4.to_ipv6_mapped().into()).unwrap();
    assert_eq!(address_of(&again), address, "an IPv4-mapped address is the same address");
}

#[test]
fn clients_get_distinct_addresses_and_reach_the_service() {
    if !runs() {
        return;
    }
    let (server, at) = somewhere();
    let clients = [(); 2].map(|()| Device::open_default_to(at).unwrap());
    let [one, two] = clients.each_ref().map(address_of);
    assert_ne!(one, two);
    for client in [one, two] {
        let IpAddr::V4(v4) = client else { panic!("{client}") };
        assert!(matches!(v4.octets(), [127, 0, 0, 2..=254]), "{client}");
    }
    let scenario = async {
        let listener = Listener::bind(&server, (at, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        for (client, from) in clients.iter().zip([one, two]) {
            let (theirs, ours) =
                tokio::join!(Connection::connect(client, address), listener.accept());
            let (theirs, ours) = (theirs.unwrap(), ours.unwrap());
            theirs.send(from.to_string().into_bytes()).await.unwrap();
            assert_eq!(&ours.recv().await.unwrap().unwrap()[..], from.to_string().as_bytes());
        }
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, scenario).await.expect("hangs") });
}

fn end(device: &Device) -> (QueuePair, Pool, ExposedRegion) {
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
    let pool = Pool::new(&pd, 64, 2).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    (QueuePair::new(&pd, &queue).unwrap(), pool, region)
}

/// Writes from one device to another. Returns the result and the first byte of the target's memory.
async fn write_from(writer: &Device, target: &Device) -> (Result<(), OpErrorKind>, u8) {
    let ((qp, pool, _ours), (theirs, _pool, region)) = (end(writer), end(target));
    // As few retries as a busy machine allows. A writer that is ignored uses all of them.
    let options =
        RetryConfig { timeout: AckTimeout::from_code(16), retry_count: 3, ..Default::default() };
    qp.connect_with(&theirs.endpoint(), &options).unwrap();
    theirs.connect_with(&qp.endpoint(), &options).unwrap();
    let written = qp.write(pool.copy_from(&[7; 8]).unwrap(), region.grant()).await;
    let mut byte = [0];
    region.read(0, &mut byte).unwrap();
    (written.map(drop).map_err(|error| error.kind()), byte[0])
}

#[test]
fn client_of_one_service_ignores_other_addresses() {
    if !runs() {
        return;
    }
    let (server, at) = somewhere();
    let (third, _) = somewhere();
    let client = Device::open_default_to(at).unwrap();
    let open = Device::open_default_towards(at).unwrap();
    let scenario = async {
        let (refused, byte) = write_from(&third, &client).await;
        let Err(OpErrorKind::Completion(error)) = refused else {
            panic!("executed: {refused:?}, {byte}")
        };
        assert_eq!((error.status, byte), (WcStatus::RETRY_EXC_ERR, 0));
        assert_eq!(
            write_from(&server, &client).await,
            (Ok(()), 7),
            "packets of the service are accepted"
        );
        assert_eq!(
            write_from(&third, &open).await,
            (Ok(()), 7),
            "a client of several hosts accepts packets of all"
        );
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, scenario).await.expect("hangs") });
}

#[test]
fn client_does_not_take_the_address_of_its_peer() {
    if !runs() {
        return;
    }
    // The server is not open yet, so its address is unused.
    let peer: IpAddr = Ipv4Addr::new(127, 0, 0, 254).into();
    assert_ne!(address_of(&Device::open_default_to(peer).unwrap()), peer);
}

#[test]
fn ipv6_loopback_address_holds_one_device() {
    if !runs() {
        return;
    }
    let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
    // Another program may use the address for a while.
    let device = (0..100).find_map(|_| Device::open_default_at(loopback).ok());
    let device = device.expect("port 4791 of ::1, and IPv6");
    let error = refused(Device::open_default_to(loopback));
    assert_eq!(
        error,
        UdpError::PortTaken {
            address: loopback,
            port: UdpConfig::PORT,
            soft_roce: false,
            device: Some(loopback.to_string())
        }
    );
    assert!(error.to_string().contains("IPv6 has no other loopback address"), "{error}");
    drop(device);
    let device = (0..100).find_map(|_| Device::open_default_to(loopback).ok());
    assert_eq!(address_of(&device.expect("the address is unused")), loopback);
}

/// Set in the process that has a network namespace of its own.
const NAMESPACE: &str = "TOKIO_RDMA_LINK_LOCAL";

#[test]
fn link_local_addresses_work_with_the_scope_of_the_interface() {
    const NAME: &str = "default_device::link_local_addresses_work_with_the_scope_of_the_interface";
    if std::env::var_os(NAMESPACE).is_none() {
        const SETUP: &str = "ip link set lo up && ip addr add fe80::1/64 dev lo nodad && \
                             ip addr add fe80::2/64 dev lo nodad";
        let inside = |script: &str| {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--net", "sh", "-c", script]);
            command.arg(std::env::current_exe().unwrap()).args(["--exact", NAME, "--nocapture"]);
            command.env(NAMESPACE, "set").env_remove("TOKIO_RDMA_DEVICE").status()
        };
        if !inside(SETUP).is_ok_and(|status| status.success()) {
            return skipped("link-local: no network namespace or no iproute2");
        }
        assert!(inside(&format!("{SETUP} && exec \"$0\" \"$@\"")).unwrap().success());
        return;
    }
    let [one, two]: [Ipv6Addr; 2] = ["fe80::1", "fe80::2"].map(|ip| ip.parse().unwrap());
    let [server, client] = [one, two].map(|ip| Device::open_default_at(ip.into()).unwrap());
    let at = |port, scope| SocketAddr::from(SocketAddrV6::new(one, port, 0, scope));
    let scenario = async {
        let refused = Listener::bind(&server, at(0, 77)).await.unwrap_err();
        assert!(refused.to_string().contains("does not belong to the device"), "{refused}");
        // The interface lo has index 1.
        for scope in [0, 1] {
            let listener = Listener::bind(&server, at(0, scope)).await.unwrap();
            let port = listener.local_addr().unwrap().port();
            assert_eq!(listener.local_addr().unwrap(), at(port, 1));
            let connecting = Connection::connect(&client, at(port, scope));
            let (ours, theirs) = tokio::join!(connecting, listener.accept());
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            ours.send(vec![7; 100_000]).await.unwrap();
            assert_eq!(theirs.recv().await.unwrap().unwrap(), vec![7; 100_000]);
            let refused = Connection::connect(&client, at(port, 77)).await.unwrap_err();
            assert!(refused.to_string().contains("no RDMA device leads"), "{refused}");
        }
        let text = Device::open_default_to(one.into()).unwrap_err().to_string();
        assert!(text.contains("Device::open_default_at"), "{text}");
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, scenario).await.expect("hangs") });
}

#[test]
fn unusable_addresses_are_refused() {
    if !runs() {
        return;
    }
    for address in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"] {
        let address: IpAddr = address.parse().unwrap();
        let error = UdpError::NotOneHost { address };
        assert_eq!(refused(Device::open_default_at(address)), error);
        assert_eq!(refused(Device::open_default_to(address)), error);
    }
    // A documentation address (RFC 5737), assigned to no host.
    let unassigned: IpAddr = "198.51.100.1".parse().unwrap();
    assert_eq!(
        refused(Device::open_default_at(unassigned)),
        UdpError::NotLocal { address: unassigned }
    );
    // A link-local address without its interface.
    let link_local: IpAddr = "fe80::1".parse().unwrap();
    let error = refused(Device::open_default_to(link_local));
    assert!(
        matches!(
            error,
            UdpError::NoRoute { peer, error } if peer == link_local && error.errno != 0
        ),
        "{error:?}"
    );
    assert_eq!(io::Error::from(OpenError::from(error)).kind(), io::ErrorKind::NetworkUnreachable);
}
