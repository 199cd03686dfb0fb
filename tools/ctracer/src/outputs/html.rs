//! A page that shows the trace in any browser, as one file and without a network: the [`Report`] as
//! JSON, and what `templates/` draws from it.

use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;
use serde_json::{Serializer, ser::Formatter};

use crate::report::Report;

const PAGE: &str = include_str!("../../templates/page.html");
const SCRIPT: &str = concat!(
    "</script>\n<script>\n",
    include_str!("../../templates/data.js"),
    include_str!("../../templates/timeline.js"),
    include_str!("../../templates/page.js"),
    "</script>\n</body>\n</html>\n",
);

/// JSON that may stand in a page: `</script>` in a thread's name would end the script.
struct InPage;

impl Formatter for InPage {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        w: &mut W,
        text: &str,
    ) -> io::Result<()> {
        w.write_all(text.replace('<', "\\u003c").as_bytes())
    }
}

/// Writes the page.
pub fn write(mut w: &mut dyn Write, report: &Report) -> Result<()> {
    w.write_all(PAGE.as_bytes())?;
    report.serialize(&mut Serializer::with_formatter(&mut w, InPage))?;
    Ok(w.write_all(SCRIPT.as_bytes())?)
}

#[cfg(test)]
mod tests;
