//! Registrations with addresses of their own and with optional rights.

use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::Transport;
use tokio_rdma::{Access, ExposedRegion, SetupError};

use crate::common::pair::Pair;
use crate::common::{Setup, in_every_mode, pattern, within};

in_every_mode! {
    region_is_accessed_at_the_addresses_that_were_chosen,
    relaxed_memory_has_all_data_once_a_completion_is_seen,
}

// Shows S3.
async fn region_is_accessed_at_the_addresses_that_were_chosen(mode: &str) {
    let Pair { a, b, setup } = Pair::new(Transport::Rc, mode);
    for iova in [0, 0x7_0000_1000, u64::MAX - 0xffff] {
        let what = format!("from {iova:#x}");
        let memory = HostMemory::zeroed(12_288).unwrap();
        let access = Access::REMOTE_ALL | Access::MW_BIND;
        let region = ExposedRegion::at(&b.pd, memory, iova, access).unwrap();
        let grant = region.grant();
        assert_eq!((grant.addr(), grant.len()), (iova, 12_288));
        let bytes = pattern(5_000, iova as u8);
        let to = grant.slice(4_090..9_090).unwrap();
        drop(within(&what, a.qp.write(a.buffer(&bytes), to)).await.unwrap());
        let read = within(&what, a.qp.read(a.blank(5_000), to)).await.unwrap();
        assert!(read[..] == bytes, "{what}");
        let sum = within(&what, a.qp.fetch_add(grant.slice(8..16).unwrap(), 5)).await.unwrap();
        assert_eq!((sum, region.load(8)), (0, Ok(5)), "{what}");
        // The region as local memory: it is addressed from `iova` here, too.
        let theirs = a.region(5_000);
        let mut copy = vec![0; 5_000];
        match region.slice(4_090..9_090) {
            Ok(local) => {
                drop(within(&what, b.qp.write(local, theirs.grant())).await.unwrap());
                theirs.read(0, &mut copy).unwrap();
                assert!(copy == bytes, "{what}");
                // Short payload, which some libraries copy themselves.
                let receive = b.qp.recv(region.slice(100..120).unwrap());
                within(&what, a.qp.send(a.buffer(b"by key"))).await.unwrap();
                drop(within(&what, receive).await.unwrap());
                theirs.write(0, b"also by key").unwrap();
                let into = region.slice(120..131).unwrap();
                let from = theirs.grant().slice(..11).unwrap();
                drop(within(&what, b.qp.read(into, from)).await.unwrap());
                region.read(100, &mut copy[..31]).unwrap();
                assert_eq!((&copy[..6], &copy[20..31]), (&b"by key"[..], &b"also by key"[..]));
            }
            Err(SetupError::Unsupported { what }) => {
                assert!(!setup.b.attr().places_by_key && what.contains("for peers"), "{what}");
            }
            Err(error) => panic!("{what}: {error}"),
        }
        if setup.b.attr().max_mw > 0 {
            let lease = within(&what, b.qp.lease(&region, 4_090..4_100, Access::REMOTE_READ))
                .await
                .unwrap();
            assert_eq!(lease.grant().addr(), iova + 4_090);
            let read = within(&what, a.qp.read(a.blank(10), lease.grant())).await.unwrap();
            assert_eq!(read[..], bytes[..10], "{what}");
            lease.revoke();
        }
        region.read(4_090, &mut copy).unwrap();
        assert!(copy == bytes, "{what}");
    }
}

// A device without the feature ignores the flag.
async fn relaxed_memory_has_all_data_once_a_completion_is_seen(mode: &str) {
    let Pair { a, b, setup } = Pair::new(Transport::Rc, mode);
    if let Some(control) = setup.control() {
        control.reorder_relaxed(true);
    }
    let relaxed = Access::REMOTE_ALL | Access::RELAXED_ORDERING;
    let memory = || HostMemory::zeroed(16_384).unwrap();
    let region = ExposedRegion::new(&b.pd, memory(), relaxed).unwrap();
    let local = ExposedRegion::new(&a.pd, memory(), Access::RELAXED_ORDERING).unwrap();
    assert!(region.access().contains(Access::RELAXED_ORDERING));
    let mut copy = vec![0; 16_384];
    for round in 0..20_u8 {
        let bytes = pattern(16_384, round);
        let received = b.qp.recv(());
        let write = a.qp.write(a.buffer(&bytes), region.grant());
        let send = a.qp.send(());
        within("a message", received).await.unwrap();
        // Before the sender knows that its work is done.
        region.read(0, &mut copy).unwrap();
        assert!(copy == bytes, "round {round}: a message was received before the data in front");
        drop(write.await.unwrap());
        send.await.unwrap();
        let into = local.slice(0..16_384).unwrap();
        drop(within("read", a.qp.read(into, region.grant())).await.unwrap());
        local.read(0, &mut copy).unwrap();
        assert!(copy == bytes, "round {round}: a READ was completed before its data");
    }
}

#[test]
fn huge_pages_without_on_demand_paging_are_refused() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let memory = HostMemory::zeroed(4_096).unwrap();
    let refused = ExposedRegion::new(&pd, memory, Access::HUGE_PAGES).unwrap_err();
    assert!(
        matches!(refused, SetupError::Unsupported { what } if what.contains("ON_DEMAND")),
        "{refused:?}"
    );
}
