//! Durations on the command line.

use std::error::Error;
use std::time::Duration;

/// Nobody has so much patience.
const MOST: Duration = Duration::from_secs(3600);

/// A number of seconds, for example 2 or 0.5.
pub(crate) fn parse(text: &str) -> Result<Duration, Box<dyn Error + Send + Sync>> {
    let duration = Duration::try_from_secs_f64(text.parse()?)?;
    if duration > MOST {
        Err(format!("0 to {} seconds are allowed", MOST.as_secs()).into())
    } else {
        Ok(duration)
    }
}
