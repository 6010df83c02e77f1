//! Events of `tracing` that are emitted only while the thread holds no lock of this workspace.
//!
//! A subscriber is code of the program, which may use any object of the program. Under a lock, the
//! macros of this module therefore only format the fields of an event. The event is emitted when
//! the thread releases its last lock. Only then does `tracing` ask the subscriber whether it wants
//! the event: that call is code of the program, too.

use tracing::dispatcher;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};

pub use tracing;
use tracing::Level;

/// Returns true if an event of `level` may reach a subscriber, by the maximum level that `tracing`
/// knows without asking the subscriber.
///
/// In a program without a subscriber, it returns true for errors and warnings: if the feature `log`
/// of `tracing` is enabled, they reach the crate `log`.
#[inline]
#[must_use]
pub fn may_be_wanted(level: Level) -> bool {
    level <= STATIC_MAX_LEVEL
        && (level <= LevelFilter::current()
            || (level <= Level::WARN && !dispatcher::has_been_set()))
}

/// Emits an event of `tracing` once this thread holds no lock. Takes fields of the forms
/// `name = %value`, `name = ?value`, `name = value`, `%name`, `?name` and `name`, and a message.
#[doc(hidden)]
#[macro_export]
macro_rules! event {
    (@ $level:ident [$($values:tt)*] [$($field:tt)*] $name:ident = % $value:expr, $($rest:tt)+) => {
        $crate::event!(
            @ $level
            [$($values)* ($name ::std::string::ToString::to_string(&$value))]
            [$($field)* $name = %$name,]
            $($rest)+
        )
    };
    (@ $level:ident [$($values:tt)*] [$($field:tt)*] $name:ident = ? $value:expr, $($rest:tt)+) => {
        $crate::event!(
            @ $level
            [$($values)* ($name ::std::format!("{:?}", $value))]
            [$($field)* $name = %$name,]
            $($rest)+
        )
    };
    (@ $level:ident [$($values:tt)*] [$($field:tt)*] $name:ident = $value:expr, $($rest:tt)+) => {
        $crate::event!(
            @ $level [$($values)* ($name ($value).to_owned())] [$($field)* $name = $name,] $($rest)+
        )
    };
    (@ $level:ident $values:tt $field:tt % $name:ident, $($rest:tt)+) => {
        $crate::event!(@ $level $values $field $name = % $name, $($rest)+)
    };
    (@ $level:ident $values:tt $field:tt ? $name:ident, $($rest:tt)+) => {
        $crate::event!(@ $level $values $field $name = ? $name, $($rest)+)
    };
    (@ $level:ident $values:tt $field:tt $name:ident, $($rest:tt)+) => {
        $crate::event!(@ $level $values $field $name = $name, $($rest)+)
    };
    (@ $level:ident [$(($name:ident $value:expr))*] [$($field:tt)*] $message:literal $(,)?) => {{
        // Together: a value may use a variable that has the name of another field.
        let ($($name,)*) = ($($value,)*);
        $crate::later::run(move || {
            $crate::events::tracing::event!(
                $crate::events::tracing::Level::$level,
                $($field)*
                $message
            );
        });
    }};
    ($level:ident, $($rest:tt)+) => {
        if $crate::events::may_be_wanted($crate::events::tracing::Level::$level) {
            $crate::event!(@ $level [] [] $($rest)+)
        }
    };
}

/// Emits an [`event!`](crate::event) of level `TRACE`.
#[doc(hidden)]
#[macro_export]
macro_rules! trace {
    ($($event:tt)+) => { $crate::event!(TRACE, $($event)+) };
}

/// Emits an [`event!`](crate::event) of level `DEBUG`.
#[doc(hidden)]
#[macro_export]
macro_rules! debug {
    ($($event:tt)+) => { $crate::event!(DEBUG, $($event)+) };
}

/// Emits an [`event!`](crate::event) of level `INFO`.
#[doc(hidden)]
#[macro_export]
macro_rules! info {
    ($($event:tt)+) => { $crate::event!(INFO, $($event)+) };
}

/// Emits an [`event!`](crate::event) of level `WARN`.
#[doc(hidden)]
#[macro_export]
macro_rules! warn {
    ($($event:tt)+) => { $crate::event!(WARN, $($event)+) };
}

/// Emits an [`event!`](crate::event) of level `ERROR`.
#[doc(hidden)]
#[macro_export]
macro_rules! error {
    ($($event:tt)+) => { $crate::event!(ERROR, $($event)+) };
}
