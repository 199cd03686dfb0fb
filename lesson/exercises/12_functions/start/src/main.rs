//! Exercise 12: which functions get a struct bio, and how often each of them is called.

use std::{cmp::Reverse, collections::BTreeMap, mem::MaybeUninit, process::ExitCode};

use anyhow::{Result, ensure};
use common::{Cli, Session, btf::Btf, btf::modules, hookable::Kernel};
use libbpf_rs::{KprobeMultiOpts, ProgramAttachType, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

#[derive(clap::Args, Debug)]
struct Options {
    /// The struct whose functions are counted: bio, request, folio, inode, sk_buff, task_struct ...
    #[arg(long = "type", value_name = "STRUCT", default_value = "bio")]
    type_name: String,
    /// List the functions that take the struct, and why some cannot be hooked; count nothing
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Options>, session: &mut Session) -> Result<()> {
    // The question: which functions take a pointer to the struct, and which of them can be hooked?
    let (name, vmlinux) = (&cli.own.type_name, Btf::read("vmlinux", None)?);
    let (functions, left_out) = functions_taking(name, &vmlinux)?;
    let (can, cannot) = (functions.len(), left_out.len());
    if cli.own.list {
        functions.iter().for_each(|[_, shown]| println!("{shown}"));
        println!("\nLeft out:\n{}\n", left_out.join("\n"));
        println!("{can:>8} functions can be hooked, {cannot} are left out");
        return Ok(());
    }
    ensure!(
        can > 0,
        "no function of this kernel that takes a struct {name} * can be hooked: see --list, or give \
         the name of another struct, without the word struct: --type request"
    );

    // kprobe.multi hooks all functions at once. A kernel that is built without fprobe has none.
    let has_multi = vmlinux.function("register_fprobe_ips").is_some();
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    if has_multi {
        open.progs.function_entry.set_attach_type(ProgramAttachType::KprobeMulti);
    }
    let skel = session.load(open)?;
    let (program, mut links) = (&skel.progs.function_entry, Vec::new());
    if has_multi {
        let symbols = functions.iter().map(|[name, _]| name.clone()).collect();
        let cookies = (0..can as u64).collect();
        let options = KprobeMultiOpts { symbols, cookies, ..Default::default() };
        links.push(program.attach_kprobe_multi_with_opts(options)?);
    }
    session.wait()?;
    println!("{can:>8} functions hooked that take a struct {name} *, {cannot} not (see --list)");
    common::print_skipped(skel.object())
}

/// Searches the BTF of the kernel and of each module. Returns the name of each function that can be hooked,
/// and how it is shown: `submit_bio(bio)`; of the others, how they are shown, and why they cannot.
fn functions_taking(name: &str, vmlinux: &Btf) -> Result<(Vec<[String; 2]>, Vec<String>)> {
    let mut taking = BTreeMap::new();
    for module in [None].into_iter().chain(modules()?.into_iter().map(Some)) {
        let own = module.as_ref().map(|name| Btf::read(name, Some(vmlinux))).transpose()?;
        let btf = own.as_ref().unwrap_or(vmlinux);
        for function in btf.functions() {
            let parameters = function.parameters();
            if parameters.iter().any(|(_, kind)| kind.points_to(name)) {
                let names: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
                let place = module.as_ref().map_or(String::new(), |module| format!(" [{module}]"));
                let shown = format!("{}({}){place}", function.name(), names.join(", "));
                taking.insert((function.name().to_owned(), module.clone()), shown);
            }
        }
    }
    let kernel = Kernel::read(&taking.keys().map(|(name, _)| name.clone()).collect())?;
    let (mut functions, mut left_out) = (Vec::new(), Vec::new());
    for ((name, module), shown) in taking {
        match kernel.refuses(&name, module.as_deref()) {
            Some(why) => left_out.push(format!("{shown}: {why}")),
            None => functions.push([name, shown]),
        }
    }
    Ok((functions, left_out))
}

/// The functions that were called, those with the most calls first.
#[expect(dead_code)] // remove this line once you call it
fn print_table<'a>(rows: impl Iterator<Item = (u64, &'a str)>) {
    let (mut called, others): (Vec<_>, Vec<_>) = rows.partition(|(calls, _)| *calls > 0);
    called.sort_by_key(|(calls, _)| Reverse(*calls));
    println!("{:>8}  function", "calls");
    called.iter().for_each(|(calls, shown)| println!("{calls:>8}  {shown}"));
    let sum: u64 = called.iter().map(|row| row.0).sum();
    let s = if called.len() == 1 { "" } else { "s" };
    println!("{sum:>8} calls of {} function{s}; {} were not called", called.len(), others.len());
}
