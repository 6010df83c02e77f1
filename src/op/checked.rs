//! An operation that may have been refused before there was anything for it to own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::operation::{Finish, Operation};
use crate::error::{OpError, OpErrorKind};

/// An operation, or why there is none; `None` once that was said.
#[derive(Debug)]
pub(crate) struct Checked<F: Finish>(Result<Operation<F>, Option<OpErrorKind>>);

impl<F: Finish> From<Result<Operation<F>, OpErrorKind>> for Checked<F> {
    #[inline]
    fn from(checked: Result<Operation<F>, OpErrorKind>) -> Self {
        Self(checked.map_err(Some))
    }
}

impl<F: Finish<Buffer = ()>> Future for Checked<F> {
    type Output = Result<F::Output, OpError<()>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Ok(operation) => Pin::new(operation).poll(context),
            Err(refused) => match refused.take() {
                Some(kind) => Poll::Ready(Err(OpError::new(kind, ()))),
                None => panic!("an operation was polled after it had completed"),
            },
        }
    }
}
