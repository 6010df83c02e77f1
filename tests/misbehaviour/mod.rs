//! Drivers that refuse calls, devices that do not flush and peers that forge requests, by the
//! controls of the software device. [`by_wire`](crate::by_wire) repeats `posting`.

mod destruction;
mod flood;
mod posting;
