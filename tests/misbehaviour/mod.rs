//! Drivers that refuse calls, devices that do not flush or that write memory out of order, and
//! peers that forge requests, by the controls of the software device.
//! [`by_wire`](crate::by_wire) repeats `posting`.

mod destruction;
mod flood;
mod posting;
mod relaxed_ordering;
