//! Durations on the command line.

use std::error::Error;
use std::time::Duration;

const MAX: Duration = Duration::from_secs(3600);

/// Parses a number of seconds, for example 2 or 0.5.
pub(crate) fn parse(text: &str) -> Result<Duration, Box<dyn Error + Send + Sync>> {
    let duration = Duration::try_from_secs_f64(text.parse()?)?;
    if duration > MAX {
        Err(format!("expected 0 to {} seconds", MAX.as_secs()).into())
    } else {
        Ok(duration)
    }
}
