//! What the owner says.

use std::fs;

use anyhow::Result;
use incidents::{
    TICKET,
    plan::{IncidentPlan, Model, name},
};

/// Prints the ticket: the service had so many requests a second when all was well.
pub fn show(plan: &IncidentPlan, level: u8, rate: f64) -> Result<()> {
    let (process, directory) = (plan.service.process(), plan.service.directory());
    let Model { ms, tags } = plan.sheet;
    let hint = match level {
        1 => format!("\n  The time is lost in: {}.\n", name(plan.answer().layer)),
        _ => String::new(),
    };
    let ticket = format!(
        "\n  Since this morning, {process} is slow: customers wait, and some of them leave.\n  \
         Nobody has changed anything. Please find out what it is.\n\n  \
         {process} has its files in {directory}, and writes to /var/log/{process}.log what took long;\n  \
         /run/{process}.status counts its requests. Last week there were {rate:.0} a second, and hardly\n  \
         one was slow. By its data sheet, the disk below takes {tags} at once, and needs {ms} ms for each\n  \
         I/O. shopd, webd, maild, backupd, reportd, tidyd, sensord, indexd and checkd run on this\n  \
         machine, and have always done so.\n{hint}"
    );
    println!(
        "{ticket}\n\
         All stages and tools are here, and `cargo vm shell` in another terminal opens one more shell\n\
         (there, {TICKET} is this ticket). Outside of the virtual machine, `cargo lesson answer` judges\n\
         what you found, all of it or a part, and `cargo lesson cured` whether you have removed the\n\
         cause; `exit` ends the incident."
    );
    Ok(fs::write(TICKET, ticket)?)
}
