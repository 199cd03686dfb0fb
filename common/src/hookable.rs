//! Which functions of the running kernel can be hooked.

use std::{
    collections::{HashMap, HashSet},
    fmt, fs,
    panic::resume_unwind,
    thread,
};

use anyhow::{Context, Result};

use crate::{kallsyms, preflight::tracefs};

/// `available_filter_functions` and `kallsyms`. Both take the kernel seconds to write: on two CPUs at
/// a time.
fn lists() -> Result<(String, String)> {
    let (traceable, symbols) = thread::scope(|scope| {
        let symbols = scope.spawn(kallsyms::read);
        let traceable = tracefs().and_then(|path| {
            let path = path.join("available_filter_functions");
            fs::read_to_string(&path)
                .with_context(|| format!("{} could not be read", path.display()))
        });
        (traceable, symbols.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    Ok((traceable?, symbols?))
}

/// What the kernel says about its functions; only about those that are asked for.
pub struct Kernel {
    /// The content of /proc/kallsyms.
    pub symbols: String,
    /// The functions that can be traced, and the module they belong to.
    traceable: HashSet<(String, Option<String>)>,
    addresses: HashMap<String, Vec<u64>>,
    /// Functions that the compiler has changed: `name` of `name.isra.0`.
    changed: HashMap<String, String>,
}

impl Kernel {
    /// Asks the kernel about the functions of these names, which takes it a second or two.
    pub fn read(names: &HashSet<String>) -> Result<Kernel> {
        let (traceable, symbols) = lists()?;
        Ok(Kernel::parse(names, &traceable, symbols))
    }

    fn parse(names: &HashSet<String>, traceable: &str, symbols: String) -> Kernel {
        let mut kernel = Kernel {
            symbols: String::new(),
            traceable: HashSet::new(),
            addresses: HashMap::new(),
            changed: HashMap::new(),
        };
        for line in traceable.lines() {
            let (name, module) = line.split_once(' ').unwrap_or((line, ""));
            if !names.contains(name) {
                continue;
            }
            let module = module.trim().trim_matches(['[', ']']);
            let module = (!module.is_empty()).then(|| module.to_owned());
            kernel.traceable.insert((name.to_owned(), module));
        }
        for symbol in kallsyms::symbols(&symbols) {
            let name = symbol.name;
            let base = name.split('.').next().unwrap_or(name);
            if !names.contains(base) || !["t", "T", "w", "W"].contains(&symbol.kind) {
                continue;
            }
            if base != name {
                kernel.changed.insert(base.to_owned(), name.to_owned());
            }
            let address = symbol.address().unwrap_or(0);
            kernel.addresses.entry(name.to_owned()).or_default().push(address);
        }
        kernel.symbols = symbols;
        kernel
    }

    /// The address of a function that [`refuses`](Kernel::refuses) says nothing against; else 0, and
    /// also where the kernel hides its addresses: then [`kernel_function`](crate::kernel_function)
    /// says why.
    pub fn address(&self, function: &str) -> u64 {
        self.addresses.get(function).and_then(|all| all.first()).copied().unwrap_or(0)
    }

    /// Why a function of vmlinux, or of a module, cannot be hooked; `None`: it can.
    pub fn refuses(&self, name: &str, module: Option<&str>) -> Option<NotHookable> {
        let known = self.addresses.get(name).map_or(0, Vec::len);
        let listed = self.traceable.contains(&(name.to_owned(), module.map(str::to_owned)));
        match (known, listed, self.changed.get(name)) {
            (0, _, Some(changed)) => Some(NotHookable::Changed(changed.clone())),
            (0, _, None) => Some(NotHookable::NoSymbol),
            (_, false, _) => Some(NotHookable::NotTraceable),
            (1, true, _) => None,
            (several, true, _) => Some(NotHookable::Several(several)),
        }
    }
}

/// Why a function cannot be hooked.
#[derive(Clone, Debug, PartialEq)]
pub enum NotHookable {
    /// It has no code of its own.
    NoSymbol,
    /// The compiler has made another function of it, of this name, with other parameters.
    Changed(String),
    /// The kernel does not list it in available_filter_functions.
    NotTraceable,
    /// So many functions have its name.
    Several(usize),
    /// It is in the list, but the kernel refuses a probe.
    Probe(String),
}

impl NotHookable {
    /// The reason, without what is special about this function.
    pub fn reason(&self) -> &'static str {
        match self {
            NotHookable::NoSymbol => "no symbol: inlined everywhere, or freed after boot",
            NotHookable::Changed(_) => "changed by the compiler",
            NotHookable::NotTraceable => "the kernel does not allow tracing it (notrace)",
            NotHookable::Several(_) => "several functions have this name",
            NotHookable::Probe(_) => "the kernel refuses a probe",
        }
    }
}

impl fmt::Display for NotHookable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            NotHookable::Changed(what) | NotHookable::Probe(what) => {
                write!(f, "{}: {what}", self.reason())
            }
            NotHookable::Several(number) => write!(f, "{number} functions have this name"),
            _ => f.write_str(self.reason()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_given() {
        let traceable = "submit_bio\nmpage_end_io\nclone_bio [dm_mod]\n";
        let symbols = "ff1 T submit_bio\nff2 t mpage_end_io\nff3 t mpage_end_io\n\
            ff4 t clone_bio\t[dm_mod]\nff5 t helper.isra.0\nff6 t hidden\nff7 D bio_data\n";
        let names = ["submit_bio", "mpage_end_io", "clone_bio", "helper", "hidden", "bio_data"];
        let kernel = Kernel::parse(&names.map(str::to_owned).into(), traceable, symbols.to_owned());
        assert_eq!(kernel.refuses("submit_bio", None), None);
        assert_eq!(kernel.refuses("clone_bio", Some("dm_mod")), None);
        let why = |name, module| kernel.refuses(name, module).unwrap().to_string();
        assert!(why("mpage_end_io", None).starts_with("2 functions"));
        assert!(why("helper", None).ends_with("helper.isra.0"));
        assert!(why("hidden", None).contains("notrace"));
        assert!(why("clone_bio", None).contains("notrace"));
        assert!(why("bio_data", None).contains("inlined"));
        assert_eq!(kernel.address("submit_bio"), 0xff1);
    }
}
