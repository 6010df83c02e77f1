//! The service of the example, and its client's calls.

/// The messages and traits that `proto/words.proto` defines.
#[allow(missing_docs, reason = "generated")]
pub mod words {
    tonic::include_proto!("words");

    /// The descriptors of the protocol, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/words.bin"));
}

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status, Streaming};

use words::words_server::Words;
use words::{Text, Total, Word};

/// The longest delay that a client may ask for.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// Counts words.
#[derive(Debug, Default)]
pub struct Counter;

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn words(text: &str) -> u64 {
    text.split_whitespace().count() as u64
}

#[tonic::async_trait]
impl Words for Counter {
    async fn count(&self, request: Request<Text>) -> Result<Response<Total>, Status> {
        let Text { text, delay_ms } = request.into_inner();
        let delay = Duration::from_millis(delay_ms.into());
        if delay > LONGEST_DELAY {
            let limit = LONGEST_DELAY.as_millis();
            return Err(Status::invalid_argument(format!("delay_ms {delay_ms} exceeds {limit}")));
        }
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        Ok(Response::new(Total { words: words(&text) }))
    }

    type SplitStream = Answers<Word>;

    async fn split(&self, request: Request<Text>) -> Result<Response<Answers<Word>>, Status> {
        let text = request.into_inner().text;
        let words: Vec<_> =
            text.split_whitespace().map(|word| Ok(Word { word: word.to_owned() })).collect();
        Ok(Response::new(Box::pin(stream::iter(words))))
    }

    type TallyStream = Answers<Total>;

    async fn tally(
        &self,
        request: Request<Streaming<Text>>,
    ) -> Result<Response<Answers<Total>>, Status> {
        let mut total = 0;
        let totals = request.into_inner().map(move |text| {
            total += words(&text?.text);
            Ok(Total { words: total })
        });
        Ok(Response::new(Box::pin(totals)))
    }
}
