//! The link of RoCE v2: packets in datagrams of UDP, on port 4791, between processes and hosts.

mod batch;
mod icrc;
mod socket;

#[cfg(test)]
mod tests;
