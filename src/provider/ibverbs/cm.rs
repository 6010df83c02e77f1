//! The connection manager of real devices: there is none yet, and nothing here can be made.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::Ibverbs;
use crate::error::VerbError;
use crate::provider::cm_contract::{self, CmEvent, CmParams, CmRoute};
use crate::types::{QpAttr, QpState};

/// Event channel; has no values.
#[derive(Debug)]
pub(crate) enum CmChannel {}

/// Id; has no values.
#[derive(Debug)]
pub(crate) enum CmId {}

impl cm_contract::CmChannel<Ibverbs> for CmChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    fn may_block(&self) -> bool {
        match *self {}
    }

    fn take_event(&self) -> Result<Option<CmEvent<Ibverbs>>, VerbError> {
        match *self {}
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        match *self {}
    }
}

impl cm_contract::CmId for CmId {
    fn key(&self) -> u64 {
        match *self {}
    }

    fn bind(&self, _: SocketAddr) -> Result<(), VerbError> {
        match *self {}
    }

    fn listen(&self, _: u32) -> Result<(), VerbError> {
        match *self {}
    }

    fn resolve_addr(&self, _: Option<SocketAddr>, _: SocketAddr, _: Duration) -> Result<(), VerbError> {
        match *self {}
    }

    fn resolve_route(&self, _: Duration) -> Result<(), VerbError> {
        match *self {}
    }

    fn connect(&self, _: &CmParams<'_>) -> Result<(), VerbError> {
        match *self {}
    }

    fn accept(&self, _: &CmParams<'_>) -> Result<(), VerbError> {
        match *self {}
    }

    fn reject(&self, _: &[u8]) -> Result<(), VerbError> {
        match *self {}
    }

    fn establish(&self) -> Result<(), VerbError> {
        match *self {}
    }

    fn disconnect(&self) -> Result<(), VerbError> {
        match *self {}
    }

    fn qp_attr(&self, _: QpState) -> Result<QpAttr, VerbError> {
        match *self {}
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        match *self {}
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        match *self {}
    }

    fn route(&self) -> Option<CmRoute> {
        match *self {}
    }
}
