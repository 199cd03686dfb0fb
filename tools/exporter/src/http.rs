//! What is served: the metrics, in one form or the other, and a page that leads to them.

use std::sync::Arc;

use anyhow::Result;
use common_http::{Answer, Request};

use crate::metrics::Format;

const START: &str = "<!DOCTYPE html>\n<title>exporter</title>\n\
    <p>Latencies of disks, for Prometheus: <a href=\"/metrics\">metrics</a>\n";

/// Answers a request.
pub fn answer(
    request: &Request,
    metrics: impl FnOnce(Format) -> Result<Arc<Vec<u8>>>,
) -> Result<Answer> {
    let accepts = request.header("accept").unwrap_or_default();
    let format = match accepts.contains("application/openmetrics-text") {
        true => Format::OpenMetrics,
        false => Format::Prometheus,
    };
    Ok(match request.path {
        "/metrics" => Answer::shared(format.content_type(), metrics(format)?),
        "/" => Answer::found("text/html; charset=utf-8", START),
        _ => Answer::refused("404 Not Found"),
    })
}
