//! Why a part of an answer is wrong, in a clause, with a figure of this incident where there is one that speaks against
//! it. A reason is about what was said: it names the right answer to no other part, and where the figures would speak
//! for what is wrong, it has none.

use crate::{
    measured::{Activity, GET, PAGE, PUT, Record, ServiceActivity, shown},
    plan::{Cure, Fault, IncidentPlan, JudgedPart, Layer, SaidAnswer, Service, Which, Who, name},
    table::part,
};

/// From which latency on a request is slow, in ms.
const SLOW_MS: f64 = 250.0;
/// A part of the I/Os' time that is too small to be the cause, in percent.
const SMALL: f64 = 30.0;

/// Each part that was said, judged; with a reason if it is wrong.
pub fn judged(
    plan: &IncidentPlan,
    record: &Record,
    said: &SaidAnswer,
) -> Vec<(JudgedPart, Option<String>)> {
    let why = Why { plan, record };
    let reason = |judged: &JudgedPart| match (judged.is_right, judged.part) {
        (true, _) => None,
        (_, "layer") => said.layer.map(|layer| why.layer(layer)),
        (_, "service") => said.service.map(|service| why.service(service)),
        (_, "who") => said.who.map(|who| why.who(who)),
        (_, "which") => said.which.map(|which| why.which(which)),
        _ => said.cure.map(|cure| why.cure(cure)),
    };
    let with_reason = |judged| {
        let reason = reason(&judged);
        (judged, reason)
    };
    said.judged(plan).into_iter().map(with_reason).collect()
}

struct Why<'r> {
    plan: &'r IncidentPlan,
    record: &'r Record,
}

impl Why<'_> {
    /// The service with the fault.
    fn own(&self) -> ServiceActivity {
        self.record.fault.of(self.plan.service)
    }

    /// What one percent of these requests exceeds, in ms.
    fn p99(&self, kinds: &[usize]) -> Option<f64> {
        self.own().percentile(kinds, 99)
    }

    /// These requests are slow; in words.
    fn slow(&self, kinds: &[usize]) -> Option<String> {
        let ms = self.p99(kinds).filter(|ms| *ms >= SLOW_MS)?;
        Some(format!("{} ms", shown(ms)))
    }

    /// At most so long took these requests, or half of them, if that is quick; in words.
    fn quick(&self, kinds: &[usize], what: &str) -> Option<String> {
        let own = self.own();
        if let Some(ms) = self.p99(kinds).filter(|ms| *ms < SLOW_MS) {
            return Some(format!("99 % of {what} took {} ms or less", shown(ms)));
        }
        let ms = own.percentile(kinds, 50).filter(|ms| *ms < SLOW_MS / 2.0)?;
        Some(format!("half of {what} took {} ms or less", shown(ms)))
    }

    fn layer(&self, said: Layer) -> String {
        let right = self.plan.answer().layer;
        match said {
            Layer::PageCache => match self.slow(&[GET, PUT]) {
                Some(ms) => format!("gets and puts never look there, and they took {ms}, too"),
                None => "what it reads there was in memory".to_owned(),
            },
            Layer::Errors => "no request failed: its log would say so".to_owned(),
            Layer::Cpu => {
                let (kinds, what): (&[usize], _) = match right {
                    Layer::PageCache => (&[GET, PUT], "its gets and puts"),
                    _ => (&[PAGE], "its pages, which need a CPU most,"),
                };
                let quick = self.quick(kinds, what);
                quick.unwrap_or("it would be slow at everything that it does".to_owned())
            }
            _ => self.of_ios(said, right),
        }
    }

    /// It is not this part of the I/Os' time.
    fn of_ios(&self, said: Layer, right: Layer) -> String {
        let (parts, name) = (&self.record.parts, name(said));
        // A table without this row has nothing but some rows, or a disk without device mapper.
        let is_whole = part(parts, "wait").is_some();
        if [Layer::PageCache, Layer::Errors].contains(&right) || !is_whole {
            let quick = self.quick(&[GET], "its gets, which are one I/O each,");
            return quick.unwrap_or(format!("an I/O spends little time in {name}"));
        }
        match part(parts, &name) {
            Some(part) if part.share < SMALL => {
                format!("{name} had {:.0} % of the I/Os' time", part.share)
            }
            None => format!("no I/O spends time in {name}"),
            Some(part) if part.p50 < SLOW_MS / 5.0 => {
                format!("half of its I/Os spent {} ms or less there", shown(part.p50))
            }
            Some(_) => format!("an I/O is not kept in {name}"),
        }
    }

    fn service(&self, said: Service) -> String {
        let of = self.record.fault.of(said);
        let (all, slow) = (of.requests(), of.slow());
        match slow * 10 < all {
            true => format!("{slow} of {all} requests of {} were slow", said.process()),
            false => format!("the ticket is not about {}", said.process()),
        }
    }

    fn who(&self, said: Who) -> String {
        match said {
            Who::Nobody => "something does much more than it did when all was well".to_owned(),
            Who::Itself => self.requests(),
            other => self.process(&name(other)),
        }
    }

    /// How many requests the service had.
    fn requests(&self) -> String {
        let rate = |activity: &Activity| activity.rate(self.plan.service);
        let (now, usual) = (rate(&self.record.fault), rate(&self.record.usual));
        format!("it answered {now:.0} requests a second, and {usual:.0} when all was well")
    }

    /// A process does what it always did.
    fn process(&self, process: &str) -> String {
        let of = |activity: &Activity| activity.processes.get(process).copied();
        let known = of(&self.record.fault).zip(of(&self.record.usual));
        let Some(((cpu, kib), (_, usual))) = known else {
            return format!("{process} does what it always did");
        };
        let io =
            format!("{process} read and wrote {kib} KiB a second, and {usual} when all was well");
        match () {
            () if cpu >= 20 => format!("{process} leaves a CPU to whoever needs one"),
            () if process == "sensord" => format!("{process} used {cpu} % of a CPU"),
            () if kib <= usual * 3 / 2 + 100 => io,
            () => format!("the service does not wait for {process}"),
        }
    }

    fn which(&self, said: Which) -> String {
        let own = self.own();
        let [puts, gets] = [self.slow(&[PUT]), self.slow(&[GET])];
        match (said, self.plan.which) {
            (Which::Reads, Which::All | Which::Range | Which::Writes) if puts.is_some() => {
                format!("its writes took {}, too", puts.unwrap_or_default())
            }
            (Which::Writes, Which::All | Which::Range) if gets.is_some() => {
                format!("its gets, which are reads, took {}, too", gets.unwrap_or_default())
            }
            (Which::Reads | Which::All, Which::Writes) => self
                .quick(&[GET], "its gets, which are reads,")
                .unwrap_or("some of them are as quick as they should be".to_owned()),
            (Which::Writes | Which::All, Which::Reads) => self
                .quick(&[PUT], "its puts, which are writes,")
                .unwrap_or("some of them are as quick as they should be".to_owned()),
            (Which::All, Which::Range) => {
                let (all, slow) = own.count(&[GET]);
                format!("{} % of its gets were quick", (all - slow.min(all)) * 100 / all.max(1))
            }
            (Which::Range, _) => "the slow ones have nothing to do with their sectors".to_owned(),
            _ => "others are slow, too".to_owned(),
        }
    }

    fn cure(&self, said: Cure) -> String {
        let parts = &self.record.parts;
        let setting = |name: &str| self.record.settings.get(name).map_or("", String::as_str);
        let limit = |file: &str| format!("{file} of its cgroup has no limit");
        let share =
            |name: &str| part(parts, name).map(|part| part.share).filter(|share| *share < SMALL);
        match said {
            Cure::IoLimit => limit("io.max"),
            Cure::MemoryLimit => limit("memory.max"),
            Cure::CpuLimit => limit("cpu.max"),
            Cure::Scheduler => match setting("scheduler") {
                one if one.contains("[none]") => "its disk has no scheduler".to_owned(),
                _ => "its scheduler does not let the disk idle".to_owned(),
            },
            Cure::NrRequests => match setting("nr_requests").parse::<u64>() {
                Ok(many) if many >= 16 => format!("nr_requests is {many}"),
                _ => "it would not help: no more could be worked on at a time".to_owned(),
            },
            Cure::LargerRequests => "a get or a put is 4 KiB, and fits into any request".to_owned(),
            Cure::QueueDepth => {
                let tags = self.plan.sheet.tags;
                format!("it takes {tags} I/Os at once, as its data sheet says")
            }
            Cure::Disk => {
                let sheet = self.plan.sheet.ms;
                let promised = format!("its data sheet promises {sheet} ms");
                match part(parts, "device").filter(|_| self.plan.fault != Fault::SlowLeg) {
                    Some(part) if part.p50 < sheet as f64 * 1.5 + 2.0 => {
                        format!("it needed {} ms for half of the I/Os; {promised}", shown(part.p50))
                    }
                    _ => format!("it is as quick as it should be; {promised}"),
                }
            }
            Cure::Table => match share("mapper") {
                Some(share) => format!("its table cost {share:.0} % of the I/Os' time"),
                None => "its table holds no I/O back".to_owned(),
            },
            Cure::Cipher => "nothing is encrypted here".to_owned(),
            Cure::Readahead => match setting("read_ahead_kb") {
                "" | "0" => "its lists are read in pieces as large as usual".to_owned(),
                kib => format!("read_ahead_kb is {kib}"),
            },
            Cure::Flushes => self.process("reportd"),
            Cure::Discards => "nothing is discarded here".to_owned(),
            Cure::Cache => "no other process lets its pages be forgotten".to_owned(),
            Cure::Copying => self.process("backupd"),
            Cure::Priority => self.process("sensord"),
            Cure::Load => self.requests(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use clap::ValueEnum;

    use super::*;
    use crate::{
        measured::{KindActivity, LIST, bucket},
        plan::Fault,
        table::Part,
    };

    fn plan_of(fault: Fault, service: Service) -> IncidentPlan {
        let mut plans = (0..2000).map(|seed| IncidentPlan::from_seed(seed, 2));
        plans.find(|plan| plan.fault == fault && plan.service == service).expect("there is one")
    }

    /// A service whose requests of these kinds were slow, and whose others were quick.
    fn activity(slow: &[usize]) -> ServiceActivity {
        let mut activity = ServiceActivity::default();
        for kind in [GET, PUT, PAGE, LIST] {
            let (ms, slow) = if slow.contains(&kind) { (1300, 40) } else { (6, 0) };
            let took = BTreeMap::from([(bucket(Duration::from_millis(ms)), 40)]);
            activity.kinds[kind] = KindActivity { slow, took };
        }
        activity
    }

    fn record(plan: &IncidentPlan) -> Record {
        let slow: &[usize] = match plan.which {
            Which::All | Which::Range => &[GET, PUT],
            Which::Writes => &[PUT],
            Which::Reads if plan.answer().layer == Layer::PageCache => &[PAGE, LIST],
            Which::Reads => &[GET],
        };
        let mut services = vec![activity(&[]); 3];
        let usual = Activity { seconds: 10.0, services: services.clone(), ..Activity::default() };
        services[plan.service as usize] = activity(slow);
        let mut fault = Activity { seconds: 10.0, services, ..Activity::default() };
        for process in ["backupd", "reportd", "tidyd", "sensord", "indexd", "checkd"] {
            fault.processes.insert(process.to_owned(), (3, 40));
        }
        let largest = match plan.answer().layer {
            // A thread that loses its CPU while it submits an I/O: wait is long.
            Layer::Cpu => "wait".to_owned(),
            layer => name(layer),
        };
        let parts = ["wait", "queue", "device", "end", "mapper", "total"].map(|one| {
            let is_largest = one == largest;
            let (share, p99) = if is_largest { (83.0, 1000.0) } else { (4.0, 5.0) };
            let p50 = if is_largest && plan.answer().layer != Layer::Cpu { 600.0 } else { 0.1 };
            Part { name: one.to_owned(), share, p50, p99, max: p99 }
        });
        let settings =
            [("scheduler", "[none] bfq"), ("nr_requests", "64"), ("read_ahead_kb", "128")];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let usual = Activity { processes: fault.processes.clone(), ..usual };
        Record { usual, fault, parts: parts.to_vec(), settings }
    }

    /// All wrong answers to one part at a time.
    fn wrong(plan: &IncidentPlan) -> Vec<SaidAnswer> {
        let none = SaidAnswer::default();
        let layers =
            Layer::value_variants().iter().map(|one| SaidAnswer { layer: Some(*one), ..none });
        let services = Service::ALL.iter().map(|one| SaidAnswer { service: Some(*one), ..none });
        let whos = Who::value_variants().iter().map(|one| SaidAnswer { who: Some(*one), ..none });
        let whichs =
            Which::value_variants().iter().map(|one| SaidAnswer { which: Some(*one), ..none });
        let cures =
            Cure::value_variants().iter().map(|one| SaidAnswer { cure: Some(*one), ..none });
        let all = layers.chain(services).chain(whos).chain(whichs).chain(cures);
        all.filter(|said| !said.judged(plan)[0].is_right).collect()
    }

    fn reason(plan: &IncidentPlan, record: &Record, said: &SaidAnswer) -> String {
        let mut judged = judged(plan, record, said);
        assert_eq!(judged.len(), 1);
        judged.remove(0).1.expect("what is wrong has a reason")
    }

    #[test]
    fn a_reason_gives_no_other_part_away() {
        for fault in Fault::value_variants() {
            for service in Service::ALL {
                let plan = plan_of(*fault, service);
                let (record, right) = (record(&plan), SaidAnswer::from(plan.answer()));
                for said in wrong(&plan) {
                    let reason = reason(&plan, &record, &said);
                    let said = said.judged(&plan)[0].clone();
                    for part in right.judged(&plan) {
                        // A disk and its table are what most reasons are about.
                        let is_about =
                            ["disk", "table", "all", "itself"].contains(&part.said.as_str());
                        // Nor is a word a secret that the learner has used: a limit of the CPU.
                        if part.part == said.part || is_about || said.said.contains(&part.said) {
                            continue;
                        }
                        let is_in = |c: char| !c.is_ascii_alphanumeric() && c != '-';
                        let names = reason
                            .split(is_in)
                            .any(|word| word == part.said || word == format!("{}d", part.said));
                        assert!(!names, "{fault:?}, {said:?}: {reason}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_reason_never_speaks_for_what_is_wrong() {
        for fault in Fault::value_variants() {
            let plan = plan_of(*fault, Service::Web);
            let record = record(&plan);
            for said in wrong(&plan) {
                let reason = reason(&plan, &record, &said);
                assert!(!reason.contains("83 %"), "{fault:?}, {said:?}: {reason}");
            }
        }
        // A thread that is throttled while it submits an I/O.
        let plan = plan_of(Fault::CpuMax, Service::Shop);
        let said = SaidAnswer { layer: Some(Layer::Wait), ..SaidAnswer::default() };
        let says = reason(&plan, &record(&plan), &said);
        assert_eq!(says, "half of its I/Os spent 0.1 ms or less there");
        // A process that does more, but not to this service.
        let mut busy = record(&plan);
        busy.fault.processes.insert("indexd".to_owned(), (70, 4000));
        busy.fault.processes.insert("backupd".to_owned(), (3, 4000));
        for (who, says) in [
            (Who::Indexd, "indexd leaves a CPU to whoever needs one"),
            (Who::Backupd, "the service does not wait for backupd"),
        ] {
            let said = SaidAnswer { who: Some(who), ..SaidAnswer::default() };
            assert_eq!(reason(&plan, &busy, &said), says);
        }
    }

    #[test]
    fn a_reason_has_a_figure_of_this_incident() {
        let plan = plan_of(Fault::SlowDisk, Service::Mail);
        let record = record(&plan);
        let says = |said: SaidAnswer| reason(&plan, &record, &said);
        let none = SaidAnswer::default();
        let reads = SaidAnswer { which: Some(Which::Reads), ..none };
        assert_eq!(says(reads), "its writes took 1311 ms, too");
        let queue = SaidAnswer { layer: Some(Layer::Queue), ..none };
        assert_eq!(says(queue), "queue had 4 % of the I/Os' time");
        let web = SaidAnswer { service: Some(Service::Web), ..none };
        assert_eq!(says(web), "0 of 160 requests of webd were slow");
        let backupd = SaidAnswer { who: Some(Who::Backupd), ..none };
        let expected = "backupd read and wrote 40 KiB a second, and 40 when all was well";
        assert_eq!(says(backupd), expected);
        let load = SaidAnswer { cure: Some(Cure::Load), ..none };
        assert_eq!(says(load), "it answered 16 requests a second, and 16 when all was well");
    }

    #[test]
    fn what_is_right_needs_no_reason() {
        let plan = plan_of(Fault::IoMax, Service::Shop);
        let all = judged(&plan, &Record::default(), &plan.answer().into());
        assert!(all.iter().all(|(part, reason)| part.is_right && reason.is_none()));
    }
}
