//! Stage 12: which functions get a struct bio, and how often each of them is called.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::{Result, ensure};
use common::{
    Cli, Session,
    btf::{self, Btf},
    hookable::{Kernel, Refusal},
    many::{At, Hooks, Means},
};
use libbpf_rs::{MapCore, MapFlags};

mod print;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

/// What only this program has.
#[derive(clap::Args, Debug)]
struct Options {
    /// The struct whose functions are counted: bio, request, folio, inode, sk_buff, task_struct ...
    #[arg(long = "type", value_name = "STRUCT", default_value = "bio")]
    type_name: String,
    /// List the functions that take the struct, and why some cannot be hooked; count nothing
    #[arg(long)]
    list: bool,
}

/// A function that takes the struct.
struct Function {
    name: String,
    /// The names of its parameters.
    parameters: String,
    /// The module that it is in; `None`: in none.
    module: Option<String>,
    /// 0 where it cannot be hooked.
    address: u64,
}

/// Functions that cannot be hooked, and why.
type LeftOut = Vec<(Function, Refusal)>;

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Options>, session: &mut Session) -> Result<()> {
    let (name, mut object) = (&cli.own.type_name, MaybeUninit::uninit());
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let vmlinux = Btf::read("vmlinux", None)?;
    let (mut functions, mut left_out) = hookable(taking(name, &vmlinux)?)?;
    if cli.own.list {
        print::list(&functions, &left_out);
        return Ok(());
    }
    ensure!(
        !functions.is_empty(),
        "no function of this kernel that takes a struct {name} * can be hooked: see --list, or give \
         the name of another struct, without the word struct: --type request"
    );
    if functions.iter().any(|function| function.address == 0) {
        // The kernel hides all addresses: the functions would share one key. This says why.
        common::kernel_function("submit_bio")?;
    }
    let means = Means::choose(&vmlinux);
    means.prepare(&mut open.progs.function_entry);
    open.maps.calls.set_max_entries(functions.len() as u32)?;
    let skel = session.load(open)?;
    let none = vec![0_u64.to_ne_bytes().to_vec(); libbpf_rs::num_possible_cpus()?];
    for function in &functions {
        skel.maps.calls.update_percpu(&function.address.to_ne_bytes(), &none, MapFlags::ANY)?;
    }
    let names: Vec<_> = functions.iter().map(|f| (f.name.as_str(), f.module.as_deref())).collect();
    let program = &skel.progs.function_entry;
    let mut hooks = Hooks::attach(means, program, At::Entry, &names, session)?;
    let not_tried = functions.split_off(hooks.tried).len();
    for (number, why) in std::mem::take(&mut hooks.refused).into_iter().rev() {
        left_out.push((functions.remove(number), Refusal::Probe(why)));
    }
    if functions.is_empty() {
        return Ok(()); // Ctrl-C came before the first one
    }

    let calls = || functions.iter().map(|function| calls(&skel.maps.calls, function)).collect();
    let (before, skipped_before) = hooks.read(calls)?;
    session.wait()?;
    let (after, skipped) = hooks.read(calls)?;
    let calls = after.iter().zip(before).map(|(after, before)| after - before);
    print::table(calls.zip(&functions).collect());
    print::left_out(functions.len(), name, &left_out);
    if not_tried > 0 {
        print::not_tried(hooks.tried, not_tried);
    }
    skipped.since(skipped_before).print("function_entry()");
    Ok(())
    // The hooks are dropped last: the user sees the results while they are removed.
}

/// Asks BTF, the kernel's and that of each module, for the functions with such a parameter.
fn taking(name: &str, vmlinux: &Btf) -> Result<Vec<Function>> {
    let mut found = functions_of(vmlinux, name, None);
    for module in btf::modules()? {
        found.extend(functions_of(&Btf::read(&module, Some(vmlinux))?, name, Some(&module)));
    }
    found.sort_by(|a, b| (&a.name, &a.module).cmp(&(&b.name, &b.module)));
    found.dedup_by(|a, b| (&a.name, &a.module) == (&b.name, &b.module));
    Ok(found)
}

fn functions_of(btf: &Btf, name: &str, module: Option<&str>) -> Vec<Function> {
    let mut found = Vec::new();
    for function in btf.functions() {
        let parameters = function.parameters();
        if parameters.iter().any(|(_, kind)| kind.points_to(name)) {
            let names: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
            found.push(Function {
                name: function.name().to_owned(),
                parameters: names.join(", "),
                module: module.map(str::to_owned),
                address: 0,
            });
        }
    }
    found
}

/// The calls of a function on all CPUs, until now.
fn calls(map: &impl MapCore, function: &Function) -> Result<u64> {
    let cpus = map.lookup_percpu(&function.address.to_ne_bytes(), MapFlags::ANY)?;
    let number = |bytes: Vec<u8>| bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default();
    Ok(cpus.unwrap_or_default().into_iter().map(number).sum())
}

/// Those that the kernel lets us hook, and the others with the reason.
fn hookable(functions: Vec<Function>) -> Result<(Vec<Function>, LeftOut)> {
    let kernel = Kernel::read(&functions.iter().map(|function| function.name.clone()).collect())?;
    let (mut hookable, mut left_out) = (Vec::new(), Vec::new());
    for function in functions {
        match kernel.refuses(&function.name, function.module.as_deref()) {
            Some(why) => left_out.push((function, why)),
            None => hookable.push(Function { address: kernel.address(&function.name), ..function }),
        }
    }
    Ok((hookable, left_out))
}
