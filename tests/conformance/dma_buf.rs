//! Memory of dma-bufs. The software device also accepts a `memfd`, which tests can read and write.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tokio_rdma::memory::DmaBufRegion;
use tokio_rdma::types::{Transport, WcStatus};
use tokio_rdma::{Access, ProtectionDomain, SetupError};

use crate::common::pair::Pair;
use crate::common::{Setup, pattern, run, skip, within};

const LEN: usize = 3 * 4096;

/// Creates a `memfd`, sealed against shrinking if `seal` is set.
fn memory(seed: u8, seal: bool) -> File {
    let mut file = File::from(
        memfd_create("tokio-rdma", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap(),
    );
    file.write_all(&pattern(LEN, seed)).unwrap();
    if seal {
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    }
    file
}

fn fd(file: &File) -> OwnedFd {
    file.try_clone().unwrap().into()
}

fn contents(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

/// Returns whether dma-bufs can be tested; otherwise checks that descriptors are refused.
fn has_dma_buf(test: &str, setup: &Setup, pd: &ProtectionDomain) -> bool {
    let takes = setup.a.attr().dma_buf;
    if !takes {
        let refused =
            DmaBufRegion::new(pd, fd(&memory(0, true)), 0..4096, Access::REMOTE_ALL).unwrap_err();
        assert!(
            matches!(refused, SetupError::Unsupported { what } if what.contains("dma-buf")),
            "{refused:?}"
        );
        assert_eq!(std::io::Error::from(refused).kind(), std::io::ErrorKind::Unsupported);
        skip(test, "the device takes no dma-bufs");
    } else if !setup.is_software() {
        // The kernel refuses descriptors of ordinary memory.
        let refused =
            DmaBufRegion::new(pd, fd(&memory(0, true)), 0..4096, Access::REMOTE_ALL).unwrap_err();
        assert!(matches!(refused, SetupError::Verb(_)), "{refused:?}");
        skip(test, "no driver that exports a dma-buf is known");
    }
    setup.is_software()
}

#[test]
fn dma_buf_memory_is_read_and_written_by_both_ends() {
    run(1, "dma-buf", async {
        let Pair { a, b, setup } = Pair::new(Transport::Rc, "event");
        if !has_dma_buf("dma_buf_memory", &setup, &b.pd) {
            return;
        }
        let (near, far) = (memory(1, true), memory(2, true));
        // Neither page-aligned nor at the address of the mapping.
        let theirs =
            DmaBufRegion::at(&b.pd, fd(&far), 100..8292, 0x7000_0064, Access::REMOTE_ALL).unwrap();
        assert_eq!((theirs.len(), theirs.grant().addr()), (8192, 0x7000_0064));
        let ours = DmaBufRegion::new(&a.pd, fd(&near), 0..LEN as u64, Access::empty()).unwrap();
        let (before, sent) = (pattern(LEN, 2), pattern(LEN, 1));

        let to = theirs.grant().slice(4000..4100).unwrap();
        drop(within("write", a.qp.write(ours.slice(4050..4150).unwrap(), to)).await.unwrap());
        assert_eq!(contents(&far, 4100, 100), sent[4050..4150]);
        assert_eq!(contents(&far, 0, 4100), before[..4100], "other bytes are unchanged");
        assert_eq!(contents(&far, 4200, LEN - 4200), before[4200..], "other bytes are unchanged");

        far.write_all_at(b"later", 200).unwrap();
        drop(
            within(
                "read",
                a.qp.read(ours.slice(0..5).unwrap(), theirs.grant().slice(100..105).unwrap()),
            )
            .await
            .unwrap(),
        );
        assert_eq!(contents(&near, 0, 5), b"later");
        assert_eq!(contents(&near, 5, 100), sent[5..105]);

        // Offset 4 of the region is aligned for atomics, because the region starts at byte 100.
        let receive = b.qp.recv(theirs.slice(8000..8192).unwrap());
        drop(within("send", a.qp.send(ours.slice(12_000..12_192).unwrap())).await.unwrap());
        assert_eq!(within("receive", receive).await.unwrap().len, 192);
        assert_eq!(contents(&far, 8100, 192), sent[12_000..12_192]);
        far.write_all_at(&40_u64.to_ne_bytes(), 104).unwrap();
        let word = theirs.grant().slice(4..12).unwrap();
        assert_eq!(within("fetch and add", a.qp.fetch_add(word, 2)).await.unwrap(), 40);
        assert_eq!(contents(&far, 104, 8), 42_u64.to_ne_bytes());

        let held = theirs.slice(0..1).unwrap();
        let theirs = theirs.into_fd().expect_err("a slice uses the region");
        drop(held);
        let grant = theirs.grant();
        drop(File::from(theirs.into_fd().expect("the region is unused")));
        let late =
            within("late write", a.qp.write(ours.slice(0..8).unwrap(), grant.slice(..8).unwrap()))
                .await;
        assert_eq!(late.unwrap_err().status(), Some(WcStatus::REM_ACCESS_ERR));
    });
}

#[test]
fn invalid_dma_buf_descriptor_is_refused() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    if !has_dma_buf("invalid_dma_buf_descriptor", &setup, &pd) {
        return;
    }
    let whole = 0..LEN as u64;
    let verb = |result: Result<DmaBufRegion, SetupError>| match result.unwrap_err() {
        SetupError::Verb(error) => (error.verb, error.errno),
        other => panic!("{other:?}"),
    };
    let refused = ("ibv_reg_dmabuf_mr", 22);
    let (sealed, shrinks) = (memory(1, true), memory(1, false));
    let new = |file: &File, range| DmaBufRegion::new(&pd, fd(file), range, Access::REMOTE_READ);
    assert_eq!(verb(new(&shrinks, whole.clone())), refused, "the file may shrink while registered");
    assert_eq!(verb(new(&File::open("/dev/zero").unwrap(), 0..4096)), refused);
    assert_eq!(
        verb(new(
            &File::open(env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml").unwrap(),
            0..16
        )),
        refused
    );
    assert_eq!(verb(new(&sealed, 1..LEN as u64 + 1)), refused, "past its end");
    assert_eq!(verb(new(&sealed, u64::MAX - 8..u64::MAX)), refused);
    assert_eq!(verb(new(&sealed, 0..0)), refused);
    let at = |range, iova| DmaBufRegion::at(&pd, fd(&sealed), range, iova, Access::REMOTE_READ);
    assert_eq!(verb(at(whole.clone(), 4097)), refused, "a different offset in the page");
    assert_eq!(verb(at(whole.clone(), u64::MAX - 4095)), refused, "wraps around");
    let reversed = std::ops::Range { start: 8, end: 4 };
    assert!(matches!(new(&sealed, reversed).unwrap_err(), SetupError::Limit(_)));
    for access in [Access::MW_BIND, Access::ON_DEMAND] {
        let refused = DmaBufRegion::new(&pd, fd(&sealed), whole.clone(), access).unwrap_err();
        assert!(matches!(refused, SetupError::Unsupported { .. }), "{refused:?}");
    }
    let region = new(&sealed, whole).unwrap();
    assert!(matches!(region.slice(0..LEN + 1).unwrap_err(), SetupError::Limit(_)));
}
