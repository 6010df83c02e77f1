//! Bound addresses: one port space per network, like the kernel's per network namespace.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rdma_provider::VerbError;
use rdma_provider::types::Gid;

/// Linux's range of ephemeral ports.
const EPHEMERAL: std::ops::RangeInclusive<u16> = 32768..=60999;

#[derive(Debug)]
struct Bound {
    claim: u64,
    ip: IpAddr,
    device: Gid,
    listens: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Ports {
    bound: BTreeMap<u16, Vec<Bound>>,
    claims: u64,
    next: u16,
}

impl Ports {
    /// Binds `address` for a device. Returns the port and a claim number for its release.
    pub(crate) fn claim(
        &mut self,
        address: SocketAddr,
        device: Gid,
    ) -> Result<(u16, u64), VerbError> {
        const VERB: &str = "rdma_bind_addr";
        let port = match address.port() {
            0 => self.any_free().ok_or(VerbError::new(VERB, VerbError::EADDRINUSE))?,
            port => port,
        };
        let ip = address.ip();
        let taken =
            self.bound.get(&port).is_some_and(|all| all.iter().any(|one| overlap(one.ip, ip)));
        if taken {
            return Err(VerbError::new(VERB, VerbError::EADDRINUSE));
        }
        self.claims += 1;
        self.bound.entry(port).or_default().push(Bound {
            claim: self.claims,
            ip,
            device,
            listens: false,
        });
        Ok((port, self.claims))
    }

    pub(crate) fn listen(&mut self, port: u16, claim: u64) {
        let bound =
            self.bound.get_mut(&port).and_then(|all| all.iter_mut().find(|one| one.claim == claim));
        if let Some(bound) = bound {
            bound.listens = true;
        }
    }

    pub(crate) fn release(&mut self, port: u16, claim: u64) {
        if let Some(all) = self.bound.get_mut(&port) {
            all.retain(|one| one.claim != claim);
            if all.is_empty() {
                self.bound.remove(&port);
            }
        }
    }

    /// Returns the device that listens at `address`.
    pub(crate) fn listener(&self, address: SocketAddr) -> Option<Gid> {
        let all = self.bound.get(&address.port())?;
        all.iter().find(|one| one.listens && covers(one.ip, address.ip())).map(|one| one.device)
    }

    fn any_free(&mut self) -> Option<u16> {
        for _ in EPHEMERAL {
            self.next =
                if EPHEMERAL.contains(&self.next) { self.next + 1 } else { *EPHEMERAL.start() };
            if EPHEMERAL.contains(&self.next) && !self.bound.contains_key(&self.next) {
                return Some(self.next);
            }
        }
        None
    }

    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.bound.values().map(Vec::len).sum()
    }
}

pub(crate) fn covers(bound: IpAddr, ip: IpAddr) -> bool {
    match bound {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => ip.is_ipv4(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => true,
        _ => bound == ip,
    }
}

fn overlap(a: IpAddr, b: IpAddr) -> bool {
    covers(a, b) || covers(b, a)
}

pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn overlapping_addresses_conflict_until_released() {
        let (a, b) = (Gid([1; 16]), Gid([2; 16]));
        let mut ports = Ports::default();
        let (port, claim) = ports.claim(at("127.0.0.1:7"), a).unwrap();
        for taken in ["127.0.0.1:7", "0.0.0.0:7", "[::]:7"] {
            assert_eq!(
                ports.claim(at(taken), b).unwrap_err().errno,
                VerbError::EADDRINUSE,
                "{taken}"
            );
        }
        let other = ports.claim(at("127.0.0.2:7"), b).unwrap();
        assert_eq!(ports.listener(at("127.0.0.2:7")), None, "bound but not listening");
        ports.listen(other.0, other.1);
        assert_eq!(ports.listener(at("127.0.0.2:7")), Some(b));
        ports.release(port, claim);
        ports.release(other.0, other.1);
        assert_eq!((ports.taken(), ports.listener(at("127.0.0.2:7"))), (0, None));
        let all = ports.claim(at("[::]:7"), a).unwrap();
        ports.listen(all.0, all.1);
        assert_eq!(
            ports.listener(at("10.0.0.1:7")),
            Some(a),
            "the unspecified IPv6 address covers both families"
        );
        assert!(ports.claim(at("10.0.0.1:7"), b).is_err());
    }

    #[test]
    fn port_zero_binds_ephemeral_ports_until_none_is_free() {
        let mut ports = Ports::default();
        let any = || at("127.0.0.1:0");
        let first = ports.claim(any(), Gid::default()).unwrap().0;
        assert!(EPHEMERAL.contains(&first));
        for _ in 1..EPHEMERAL.len() {
            ports.claim(any(), Gid::default()).unwrap();
        }
        assert_eq!(ports.taken(), EPHEMERAL.len());
        assert_eq!(ports.claim(any(), Gid::default()).unwrap_err().errno, VerbError::EADDRINUSE);
    }
}
