//! Which functions take a pointer to the struct, and which of them can be traced.

use std::{collections::HashSet, fs};

use anyhow::{Context, Result, bail};
use common::{
    btf::{self, Btf, Type},
    hookable::Kernel,
};
use glob::Pattern;

use crate::{
    attach,
    cli::Ctracer,
    decode::Scalar,
    lives::Rules,
    record::{Function, OBJECTS, Probe, Trace},
};

/// How many integer arguments both calling conventions, x86-64's and arm64's, pass in registers.
const REGISTERS: usize = 6;

/// What was found.
#[derive(Default)]
pub struct Discovery {
    /// The functions to trace.
    pub functions: Vec<Function>,
    /// The others, and why.
    pub left_out: Vec<(Function, String)>,
    /// The content of /proc/kallsyms.
    pub symbols: String,
}

/// Asks the BTF of vmlinux and of all loaded modules.
///
/// Fails where the kernel has no such struct, or no function that takes it can be traced.
pub fn discover(cli: &Ctracer, vmlinux: &Btf) -> Result<Discovery> {
    let name = &cli.type_name;
    if cli.dev.is_some() && name != "bio" {
        bail!("--dev needs bios, and a struct {name} is none: leave it out");
    }
    if vmlinux.structure(name).is_none() {
        bail!(
            "this kernel has no struct {name}: give the name of a struct without the word struct, \
             for example --type request"
        );
    }
    let mut found = Discovery::default();
    let mut candidates = taking(vmlinux, name, None);
    for module in btf::modules()? {
        let btf = Btf::read(&module, Some(vmlinux))?;
        candidates.extend(taking(&btf, name, Some(&module)));
    }
    if candidates.is_empty() {
        bail!("no function of this kernel takes a struct {name} *: there is nothing to trace");
    }
    let names = candidates.iter().map(|(function, _)| function.name.clone()).collect();
    let kernel = Kernel::read(&names)?;
    for (mut function, hidden) in candidates {
        let refused = kernel.refuses(&function.name, function.module.as_deref());
        let refused = refused.map(|why| why.to_string());
        if let Some(why) = unwanted(&function, cli).or(refused).or(hidden) {
            found.left_out.push((function, why));
        } else {
            function.probe.address = kernel.address(&function.name);
            found.functions.push(function);
        }
    }
    found.symbols = kernel.symbols;
    found.functions.sort_by(|a, b| a.name.cmp(&b.name));
    for (number, function) in found.functions.iter_mut().enumerate() {
        function.probe.cookie = attach::cookie(number, &function.probe);
    }
    found.left_out.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    if found.functions.is_empty() && !cli.list {
        bail!(
            "none of the {} functions that take a struct {name} * can be traced: --list shows why",
            found.left_out.len()
        );
    }
    Ok(found)
}

/// The functions of one BTF that take the struct, and why the registers of one cannot be told.
fn taking(btf: &Btf, name: &str, module: Option<&str>) -> Vec<(Function, Option<String>)> {
    let mut seen = HashSet::new();
    let takes =
        |function: &Type| function.parameters().iter().any(|(_, kind)| kind.points_to(name));
    let found = btf.functions().filter(|function| takes(function) && seen.insert(function.name()));
    found.map(|function| candidate(function, name, module)).collect()
}

fn candidate(function: Type, name: &str, module: Option<&str>) -> (Function, Option<String>) {
    let parameters = function.parameters();
    let passed = registers(&parameters);
    let takes = |&at: &usize| parameters[at].1.points_to(name);
    let objects: Vec<usize> = (0..parameters.len()).filter(takes).take(OBJECTS).collect();
    let hidden = objects.iter().find(|&&at| passed[at].is_none());
    let hidden = hidden.map(|&at| format!("parameter {} is passed on the stack", parameters[at].0));
    let device = parameters.iter().position(|(_, kind)| kind.points_to("block_device"));
    let (mut others, mut statuses) = (Vec::new(), Vec::new());
    for (at, (name, kind)) in parameters.iter().enumerate() {
        let Some(register) = passed[at].filter(|_| !objects.contains(&at)) else { continue };
        let name = if name.is_empty() { format!("arg{}", at + 1) } else { (*name).to_owned() };
        let register = usize::from(register) - 1;
        others.extend(Scalar::in_register(*kind).map(|scalar| (name, register, scalar)));
        statuses.extend((kind.name() == "blk_status_t").then_some(register));
    }
    let declared = parameters.iter().map(|(name, kind)| kind.declaration() + name);
    let declared: Vec<String> = declared.map(|text| text.trim_end().to_owned()).collect();
    let result = function.result();
    let function = Function {
        name: function.name().to_owned(),
        module: module.map(str::to_owned),
        prototype: format!("{}{}({})", result.declaration(), function.name(), declared.join(", ")),
        parameters: parameters.iter().map(|(name, _)| (*name).to_owned()).collect(),
        probe: Probe {
            effect: Rules(name).effect(function.name()),
            arguments: objects.iter().map(|&at| at as u8).collect(),
            registers: objects.iter().filter_map(|&at| passed[at]).collect(),
            device: device.and_then(|at| passed[at]),
            others,
            statuses,
            returns: Scalar::in_register(result),
            ..Probe::default()
        },
    };
    (function, hidden)
}

/// The first register of each parameter, 1 to 6; `None`: it is passed on the stack. A struct that is
/// passed by value takes two registers, one, or none.
fn registers(parameters: &[(&str, Type)]) -> Vec<Option<u8>> {
    let mut next = 1;
    let place = |(_, kind): &(&str, Type)| {
        let taken = kind.registers().filter(|taken| next + taken <= REGISTERS + 1)?;
        let register = next as u8;
        next += taken;
        Some(register)
    };
    parameters.iter().map(place).collect()
}

fn unwanted(function: &Function, cli: &Ctracer) -> Option<String> {
    let name = &function.name;
    let matches = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
    if name.starts_with("__traceiter_") || name.starts_with("__probestub_") {
        Some("part of a tracepoint".to_owned())
    } else if matches(&cli.skip) {
        Some("--skip".to_owned())
    } else if !cli.only.is_empty() && !matches(&cli.only) {
        Some("not in --only".to_owned())
    } else {
        None
    }
}

impl Discovery {
    /// Prints what `--list` promises.
    pub fn print(&self) {
        let place = |f: &Function| f.module.as_ref().map_or(String::new(), |m| format!(" [{m}]"));
        for function in &self.functions {
            println!("{}{}", function.prototype, place(function));
        }
        println!("\nLeft out:");
        for (function, why) in &self.left_out {
            println!("{}{}: {why}", function.prototype, place(function));
        }
        let count = self.functions.len();
        println!("\n{count:>8} functions can be traced, {} are left out", self.left_out.len());
    }

    /// A trace of these functions, without events.
    pub fn into_trace(self, type_name: &str) -> Result<Trace> {
        let path = "/proc/sys/kernel/osrelease";
        let release = fs::read_to_string(path).context(path)?.trim().to_owned();
        Ok(Trace { type_name: type_name.to_owned(), release, functions: self.functions })
    }
}
