//! How a tool that is not ours is started in the guest, and within which bounds: one that hangs or floods
//! spoils its own cells only.

use std::{fmt, time::Duration};

use bench::plan::MOUNTS;

use crate::{Family, Tool, TruthPlan, Verdict};

/// How long its start may take: bcc's tools compile, for a minute in an emulated machine that is busy.
const READY_LIMIT: Duration = Duration::from_secs(400);
/// How long the start of a tool of yours may take that does not compile with the kernel's headers.
const READY_LIMIT_OF_YOURS: Duration = Duration::from_secs(180);
/// How many bytes it may print: more is a flood.
const OUTPUT_LIMIT: u64 = 32 << 20;

/// It hung, or flooded: how.
#[derive(Debug)]
pub struct Broke(pub String);

impl fmt::Display for Broke {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Broke {}

impl Broke {
    /// What it means. Of a package that many use, the emulated machine is the likelier reason.
    pub fn verdict(self, tool: &Tool) -> Verdict {
        match tool.family {
            Family::Yours => Verdict::Broke { how: self.0 },
            _ => Verdict::NotRun { why: self.0 },
        }
    }

    /// Where so many bytes are too many.
    pub fn if_flood(printed: u64) -> Result<(), Broke> {
        match printed < OUTPUT_LIMIT {
            true => Ok(()),
            false => Err(Broke(format!("it printed more than {} MiB", OUTPUT_LIMIT >> 20))),
        }
    }
}

impl Tool {
    /// Whether it needs the kernel's headers.
    pub fn needs_headers(&self) -> bool {
        self.headers || self.family == Family::Bcc
    }

    /// How long it may take until it is ready.
    pub fn ready_limit(&self) -> Duration {
        match self.family {
            Family::Yours if !self.headers => READY_LIMIT_OF_YOURS,
            _ => READY_LIMIT,
        }
    }

    /// The directory of the root in which it runs; empty: that of the guest.
    pub fn root(&self, plan: &TruthPlan) -> String {
        let root = self.rootfs.as_ref().and_then(|name| plan.rootfs.get(name));
        root.map_or(String::new(), |root| root.display().to_string())
    }

    /// A script that prepares the root: what it needs there, and is not among what is `mounted`, as in
    /// /proc/mounts.
    pub fn mounts(&self, plan: &TruthPlan, mounted: &str) -> String {
        let to = self.root(plan);
        let is_mounted = |dir: &str| to.is_empty() || mounted.contains(&format!(" {to}{dir} "));
        let mut script = String::new();
        if !is_mounted("/proc") {
            let headers = plan.headers.as_deref().unwrap_or("".as_ref()).display();
            script = format!("set -- '{to}' '{headers}'; {MOUNTS}");
        }
        if let Some(dir) = self.dir.as_ref().map(|dir| dir.display().to_string())
            && !is_mounted(&dir)
        {
            script += &format!("mkdir -p '{to}{dir}'; mount --bind '{dir}' '{to}{dir}'\n");
        }
        script
    }

    /// The command in its root: what it prints comes line by line, though that is no terminal. A file that
    /// it writes ends at a limit, and where memory is short, it goes first.
    pub fn command(&self, plan: &TruthPlan) -> Vec<String> {
        let root = self.root(plan);
        let root = if root.is_empty() { "/" } else { &root };
        let limit = format!("--fsize={OUTPUT_LIMIT}");
        let words = ["prlimit", &limit, "choom", "-n", "1000", "--", "chroot", root, "env"];
        let dir = self.dir.as_ref().map(|dir| format!("--chdir={}", dir.display()));
        let words = words.map(str::to_owned).into_iter().chain(dir);
        let words = words.chain(["stdbuf", "-oL"].map(str::to_owned));
        words.chain(self.argv.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_gets_its_directory_in_its_root() {
        let text = "name = 't'\ncommand = ['./t.py']\nanswers = {}\ndir = '/home/me/a b'\n";
        let mut tool: Tool = toml::from_str(text).unwrap();
        let rootfs = [("sid".to_owned(), "/roots/sid".into())].into();
        let (cells, yours) = (Vec::new(), Vec::new());
        let headers = Some("/roots/headers".into());
        let plan = TruthPlan { cells, runs: 1, rootfs, headers, yours, shows: false };
        let within = "chroot / env --chdir=/home/me/a b stdbuf -oL ./t.py";
        assert!(tool.command(&plan).join(" ").ends_with(within));
        assert_eq!(tool.mounts(&plan, ""), "");
        tool.rootfs = Some("sid".into());
        assert!(tool.command(&plan).contains(&"/roots/sid".to_owned()));
        let all = tool.mounts(&plan, "");
        assert!(all.starts_with("set -- '/roots/sid' '/roots/headers'; cd "), "{all}");
        let own = "mkdir -p '/roots/sid/home/me/a b'; mount --bind '/home/me/a b' '/roots/sid/home/me/a b'\n";
        assert_eq!(tool.mounts(&plan, "proc /roots/sid/proc proc rw"), own);
        assert!(
            Broke::if_flood(OUTPUT_LIMIT - 1).is_ok() && Broke::if_flood(OUTPUT_LIMIT).is_err()
        );
    }
}
