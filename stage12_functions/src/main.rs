//! Stage 12: which functions get a struct bio, and how often each of them is called.

use std::{collections::BTreeMap, mem::MaybeUninit, process::ExitCode};

use anyhow::{Result, ensure};
use common::{Cli, Session, btf, hookable::Kernel};
use libbpf_rs::{KprobeMultiOpts, KprobeOpts, ProgramAttachType, num_possible_cpus, skel::Skel};

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

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Options>, session: &mut Session) -> Result<()> {
    let (name, mut object) = (&cli.own.type_name, MaybeUninit::uninit());
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;

    // Which functions take a pointer to the struct? BTF knows, the kernel's and that of each module.
    let vmlinux = btf::Btf::read("vmlinux", None)?;
    let mut taking = BTreeMap::new();
    add_functions(&mut taking, name, &vmlinux, None);
    for module in btf::modules()? {
        let btf = btf::Btf::read(&module, Some(&vmlinux))?;
        add_functions(&mut taking, name, &btf, Some(module));
    }
    // Which of them can be hooked? Two lists of the kernel say it.
    let kernel = Kernel::read(&taking.keys().map(|(name, _)| name.clone()).collect())?;
    let (mut functions, mut left_out) = (Vec::new(), Vec::new());
    for ((name, module), shown) in taking {
        match kernel.refuses(&name, module.as_deref()) {
            Some(why) => left_out.push((shown, why)),
            None => functions.push((name, shown)),
        }
    }
    let (can, cannot) = (functions.len(), left_out.len());
    if cli.own.list {
        functions.iter().for_each(|(_, shown)| println!("{shown}"));
        println!("\nLeft out:");
        left_out.iter().for_each(|(shown, why)| println!("{shown}: {why}"));
        println!("\n{can:>8} functions can be hooked, {cannot} are left out");
        return Ok(());
    }
    ensure!(
        can > 0,
        "no function of this kernel that takes a struct {name} * can be hooked: see --list, or give \
         the name of another struct, without the word struct: --type request"
    );

    // kprobe.multi hooks all functions at once. A kernel that is built without fprobe has none.
    let has_multi = vmlinux.function("register_fprobe_ips").is_some();
    if has_multi {
        open.progs.function_entry.set_attach_type(ProgramAttachType::KprobeMulti);
    }
    open.maps.calls.set_max_entries(can as u32)?;
    let skel = session.load(open)?;
    let (program, mut links) = (&skel.progs.function_entry, Vec::new());
    if has_multi {
        let symbols = functions.iter().map(|(name, _)| name.clone()).collect();
        let cookies = (0..can as u64).collect();
        let options = KprobeMultiOpts { symbols, cookies, ..Default::default() };
        links.push(program.attach_kprobe_multi_with_opts(options)?);
    } else {
        for (cookie, (name, _)) in (0..).zip(&functions) {
            if session.is_over() {
                return Ok(()); // Ctrl-C
            }
            let options = KprobeOpts { cookie, ..Default::default() };
            links.push(program.attach_kprobe_with_opts(false, name, options)?);
        }
    }
    // The first functions were hooked before the last ones: what they have counted so far is subtracted.
    let cpus = num_possible_cpus()?;
    let before = common::per_cpu::<u64>(&skel.maps.calls)?;
    session.wait()?;
    let after = common::per_cpu::<u64>(&skel.maps.calls)?;
    let sum = |of: &[u64], n: usize| of[n * cpus..][..cpus].iter().sum::<u64>();
    let calls = (0..can).map(|n| sum(&after, n) - sum(&before, n));
    let mut rows: Vec<_> = calls.zip(&functions).filter(|(calls, _)| *calls > 0).collect();
    rows.sort_by_key(|(calls, _)| std::cmp::Reverse(*calls));

    println!("{:>8}  function", "calls");
    rows.iter().for_each(|(calls, (_, shown))| println!("{calls:>8}  {shown}"));
    let (sum, called) = (rows.iter().map(|(calls, _)| calls).sum::<u64>(), rows.len());
    println!("{sum:>8} calls of {called} functions; {} were not called", can - called);
    println!("{can:>8} functions hooked that take a struct {name} *, {cannot} not (see --list)");
    common::print_skipped(skel.object())
}

/// Adds the functions that have such a parameter: `submit_bio(bio)`, by their name and module.
fn add_functions(
    to: &mut BTreeMap<(String, Option<String>), String>,
    name: &str,
    btf: &btf::Btf,
    module: Option<String>,
) {
    let place = module.as_ref().map_or(String::new(), |module| format!(" [{module}]"));
    for function in btf.functions() {
        let parameters = function.parameters();
        if parameters.iter().any(|(_, kind)| kind.points_to(name)) {
            let names: Vec<&str> = parameters.iter().map(|(name, _)| *name).collect();
            let shown = format!("{}({}){place}", function.name(), names.join(", "));
            to.insert((function.name().to_owned(), module.clone()), shown);
        }
    }
}
