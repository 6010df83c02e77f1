//! An operation that may be refused before it owns anything.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::operation::{Operation, OperationKind};
use crate::coop::within_budget;
use crate::engine::WorkQueue;
use crate::error::{OpError, OpErrorKind};
use crate::types::WrId;

/// An operation, or why it was refused; `None` once the future has returned the reason.
#[derive(Debug)]
pub(crate) struct Checked<F: OperationKind>(Result<Operation<F>, Option<OpErrorKind>>);

impl<F: OperationKind> From<Result<Operation<F>, OpErrorKind>> for Checked<F> {
    #[inline]
    fn from(checked: Result<Operation<F>, OpErrorKind>) -> Self {
        Self(checked.map_err(Some))
    }
}

impl<F: OperationKind> Checked<F> {
    pub(super) fn posted(&self) -> Option<(&Arc<WorkQueue>, WrId)> {
        self.0.as_ref().ok()?.posted()
    }

    pub(super) fn is_finished(&self) -> bool {
        self.0.as_ref().map_or(true, Operation::is_finished)
    }
}

impl<F: OperationKind<Buffer = ()>> Future for Checked<F> {
    type Output = Result<F::Output, OpError<()>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Ok(operation) => Pin::new(operation).poll(context),
            Err(refused) => within_budget(context, |_| match refused.take() {
                Some(kind) => Poll::Ready(Err(OpError::new(kind, ()))),
                None => panic!("operation polled after completion"),
            }),
        }
    }
}
