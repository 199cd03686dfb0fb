//! What guests need before they judge: programs, root file systems, and what a newer kernel is compared with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result};
use truth::{Tool, TruthPlan, TruthReport};
use vm::cargo::{GUEST, build, build_all};
use vm::fetch::rootfs::{self, Rootfs};
use vm::run::{For, Run};
use workshop::say;

use crate::comparison::{Comparison, Purpose};
use crate::kernel_diff::{self, Functions};
use crate::results;

/// The root file systems that `tools.toml` names.
const ROOTFS: [(&str, &str); 2] = [
    ("sid", include_str!("../rootfs-sid.toml")),
    ("bookworm", include_str!("../rootfs-bookworm.toml")),
];

/// What a comparison has built and fetched.
pub struct Prepared {
    /// The program of the guest tests.
    pub tests: PathBuf,
    /// The launcher, which boots a guest.
    pub launcher: PathBuf,
    /// What every guest is told: but for its cells, and its kernel's headers.
    pub plan: TruthPlan,
    /// What a newer kernel is compared with.
    pub before: Option<Before>,
}

/// The newest kernel of the page, beside a newer one.
pub struct Before {
    /// The page.
    pub page: TruthReport,
    /// The functions of both kernels.
    pub functions: [Functions; 2],
}

impl Prepared {
    /// Builds and fetches what `comparison` needs.
    pub fn make(comparison: &Comparison) -> Result<Prepared> {
        let run = &comparison.run;
        run.need_packages(For::Test)?;
        // Built as `cargo vm test` does: what it has built is not built again.
        let tests = build(&run.cargo, &["test", "--workspace", "--no-run"], GUEST)?;
        build_all(&run.cargo)?;
        let launcher = build(&run.cargo, &["build", "--package", "vm", "--bin", "vm"], "vm")?;
        let before = match comparison.purpose {
            Purpose::KernelDiff => {
                let page = results::read(run.workspace())?;
                let old = page.newest().unwrap_or_default();
                let functions = [
                    kernel_diff::functions(run, &launcher, old)?,
                    kernel_diff::functions(run, &launcher, &comparison.kernels[0])?,
                ];
                Some(Before { page, functions })
            }
            _ => None,
        };
        let plan = TruthPlan {
            cells: Vec::new(),
            runs: comparison.runs,
            rootfs: rootfs_of(run, &comparison.tools, comparison.newest)?,
            headers: None,
            yours: comparison.yours.clone(),
            shows: comparison.purpose == Purpose::Cell,
        };
        Ok(Prepared { tests, launcher, plan, before })
    }
}

/// The root file systems that these tools need, by name; `newest`: made anew.
fn rootfs_of(run: &Run, tools: &[Tool], newest: bool) -> Result<BTreeMap<String, PathBuf>> {
    let names: BTreeSet<&str> = tools.iter().filter_map(|tool| tool.rootfs.as_deref()).collect();
    let made = |name: &str| {
        let found = ROOTFS.iter().find(|(known, _)| *known == name);
        let (_, text) = found.with_context(|| format!("truth/tools.toml: there is no {name}"))?;
        let rootfs = Rootfs::parse(text)?;
        if newest {
            rootfs.remove(&run.cache)?;
        }
        Ok((name.to_owned(), rootfs.get(&run.source, &run.cache)?))
    };
    names.into_iter().map(made).collect()
}

/// The version of a tool's package there. None for ours.
pub fn version(plan: &TruthPlan, tool: &Tool) -> Option<String> {
    rootfs::version(plan.rootfs.get(tool.rootfs.as_ref()?)?, tool.package.as_ref()?)
}

/// The headers of a kernel line, for bcc's tools.
pub fn headers(run: &Run, kernel: &str) -> Result<Option<PathBuf>> {
    let Ok(line) = run.table.line(kernel) else {
        say!("{kernel} is no kernel line, so there are no headers of it, which bcc's tools need");
        return Ok(None);
    };
    rootfs::headers(line, &run.table.kernel(kernel)?.release, &run.source, &run.cache)
}
