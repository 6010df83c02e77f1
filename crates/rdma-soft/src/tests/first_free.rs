//! Address selection of a device over UDP.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use super::*;

fn free() -> (u16, [IpAddr; 3]) {
    for _ in 0..100 {
        let random = getrandom::u64().unwrap();
        let port = 10_000 + (random >> 50) as u16;
        let first = u32::from_be_bytes([127, 40, 0, 1]) + (random as u32 & 0x0007_fff0);
        let addresses = [0, 1, 2].map(|at| Ipv4Addr::from(first + at).into());
        if addresses.iter().all(|&address| UdpSocket::bind((address, port)).is_ok()) {
            return (port, addresses);
        }
    }
    panic!("no free addresses in 100 attempts");
}

#[test]
fn first_free_address_is_bound_until_all_are_taken() {
    let (port, addresses) = free();
    let [a, b, c] = addresses;
    let other = UdpSocket::bind((b, port)).unwrap();
    let (first, at) = Network::at_first_free(port, &addresses, None).unwrap();
    assert_eq!(at, a);
    let (_third, at) = Network::at_first_free(port, &addresses, None).unwrap();
    assert_eq!(at, c, "another program has {b}");
    let none = UdpError::AllTaken { first: a, last: c, port };
    assert_eq!(Network::at_first_free(port, &addresses, None).unwrap_err(), none);
    assert_eq!(
        none.to_string(),
        format!(
            "UDP port {port} is in use at every address from {a} to {c}; stop a program that uses \
             it"
        )
    );
    drop(other);
    assert_eq!(Network::at_first_free(port, &addresses, None).unwrap().1, b);
    drop(first);
    assert_eq!(Network::at_first_free(port, &addresses, None).unwrap().1, a);
}

#[test]
fn single_taken_address_reports_its_owner_and_foreign_address_fails_at_once() {
    let (port, [a, b, _]) = free();
    let _other = UdpSocket::bind((a, port)).unwrap();
    let taken = UdpError::PortTaken { address: a, port, soft_roce: false, device: None };
    assert_eq!(Network::at_first_free(port, &[a], None).unwrap_err(), taken);
    let missing: IpAddr = "198.51.100.1".parse().unwrap();
    assert_eq!(
        Network::at_first_free(port, &[a, missing, b], None).unwrap_err(),
        UdpError::NotLocal { address: missing }
    );
    assert_eq!(Network::at_first_free(port, &[], None).unwrap_err(), UdpError::NoDevice);
}
