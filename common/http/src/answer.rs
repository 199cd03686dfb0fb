//! What a client gets.

use std::sync::Arc;

/// What is sent back.
#[derive(Debug, PartialEq)]
pub struct Answer {
    /// `200 OK`
    pub status: &'static str,
    /// The type of the body: `text/html; charset=utf-8`
    pub kind: &'static str,
    /// What is shown, or read. Several clients may share it.
    pub body: Arc<Vec<u8>>,
}

impl Answer {
    /// What was asked for.
    pub fn found(kind: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer::shared(kind, Arc::new(body.into()))
    }

    /// What was asked for, in memory that others have, too.
    pub fn shared(kind: &'static str, body: Arc<Vec<u8>>) -> Answer {
        Answer { status: "200 OK", kind, body }
    }

    /// A status that says why there is nothing else: `404 Not Found`.
    pub fn refused(status: &'static str) -> Answer {
        let body = Arc::new(format!("{status}\n").into_bytes());
        Answer { status, kind: "text/plain; charset=utf-8", body }
    }
}
