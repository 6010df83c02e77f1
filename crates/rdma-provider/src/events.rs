//! Events of `tracing` that reach the subscriber without a lock of ours.
//!
//! Under a lock, an event's fields are formatted at once, and it is emitted at the release of the
//! last lock. Neither consults the subscriber: whether it wants the event is asked with the event.

use tracing::dispatcher;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};

pub use tracing;
use tracing::Level;

/// Returns true if a subscriber may want events of `level`, or the crate `log`, to which `tracing`
/// passes events of a program without subscriber if its feature `log` is enabled.
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
        $crate::locks::when_none_is_held(move || {
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
