//! From a seed to an incident: what is wrong, where, and what the right answer is.

use clap::{Args, ValueEnum};

/// As the command line writes it.
pub fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Where the time is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layer {
    /// Reads that would have found their pages in memory go to the disk
    PageCache,
    /// Before there is a request
    Wait,
    /// It has a request, and the driver has not
    Queue,
    /// The disk itself
    Device,
    /// After the disk
    End,
    /// Device mapper
    Mapper,
    /// No I/O is slow: the process gets no CPU
    Cpu,
    /// No I/O is slow: some fail, and are made again
    Errors,
}

/// A service, and the disk below its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Service {
    /// shopd, in /srv/shop
    Shop,
    /// webd, in /srv/web
    Web,
    /// maild, in /srv/mail
    Mail,
}

impl Service {
    /// All of them.
    pub const ALL: [Service; 3] = [Service::Shop, Service::Web, Service::Mail];

    /// `shop`.
    pub fn name(self) -> &'static str {
        ["shop", "web", "mail"][self as usize]
    }

    /// `shopd`.
    pub fn process(self) -> String {
        format!("{}d", self.name())
    }

    /// `/srv/shop`.
    pub fn directory(self) -> String {
        format!("/srv/{}", self.name())
    }
}

/// What has to be stopped or limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Who {
    /// A setting, or the disk: no process
    Nobody,
    /// The slow service itself does too much
    Itself,
    /// Copies the services' files
    Backupd,
    /// Writes a report
    Reportd,
    /// Removes what is old
    Tidyd,
    /// Reads a sensor
    Sensord,
    /// Computes an index
    Indexd,
    /// Reads files again, to check them
    Checkd,
}

/// Which I/Os of the service are slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// Reads and writes
    All,
    /// Reads only
    Reads,
    /// Writes only
    Writes,
    /// Those of a range of sectors
    Range,
}

/// What would remove the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cure {
    /// Raise or remove the limit on the cgroup's I/O
    IoLimit,
    /// Raise or remove the limit on the cgroup's memory
    MemoryLimit,
    /// Raise or remove the limit on the cgroup's CPU time
    CpuLimit,
    /// Another I/O scheduler, or other settings of it
    Scheduler,
    /// Let the queue hold more requests
    NrRequests,
    /// Let a request be larger
    LargerRequests,
    /// A device that takes more than one I/O at a time
    QueueDepth,
    /// Another disk in the place of this one
    Disk,
    /// Another table for device mapper
    Table,
    /// A faster cipher, or none
    Cipher,
    /// Another size of the readahead
    Readahead,
    /// Fewer calls of fsync
    Flushes,
    /// Discard less, or at another time
    Discards,
    /// Stop the process that empties the cache
    Cache,
    /// Another time, or another rate, for the process that copies
    Copying,
    /// A lower priority for the process that takes the CPU
    Priority,
    /// Less work for the service
    Load,
}

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncidentAnswer {
    /// Where the time is lost.
    pub layer: Layer,
    /// Whose disk it is: the service's that is slow.
    pub service: Service,
    /// The process that has to be stopped or limited.
    pub who: Who,
    /// Which of the service's I/Os are slow.
    pub which: Which,
    /// What would remove the cause.
    pub cure: Cure,
}

/// How many parts an answer has.
pub const PARTS: usize = 5;

/// What a learner says it is: all of it, or those parts that they are sure of.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[group(id = "said", required = true, multiple = true)]
pub struct SaidAnswer {
    /// Where the time is lost
    #[arg(long)]
    pub layer: Option<Layer>,
    /// Whose disk it is: the service's that is slow
    #[arg(long)]
    pub service: Option<Service>,
    /// The process that has to be stopped or limited
    #[arg(long)]
    pub who: Option<Who>,
    /// Which of the service's I/Os are slow
    #[arg(long)]
    pub which: Option<Which>,
    /// What would remove the cause
    #[arg(long)]
    pub cure: Option<Cure>,
}

/// A part of an answer that a learner has given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JudgedPart {
    /// What it is about: `layer`.
    pub part: &'static str,
    /// What it says: `wait`.
    pub said: String,
    /// Whether that is right.
    pub is_right: bool,
}

impl SaidAnswer {
    /// The parts that were given, each judged by itself.
    pub fn judged(&self, plan: &IncidentPlan) -> Vec<JudgedPart> {
        fn part<T: ValueEnum>(
            part: &'static str,
            said: Option<T>,
            is_right: impl Fn(&T) -> bool,
        ) -> Option<JudgedPart> {
            let said = said?;
            Some(JudgedPart { part, is_right: is_right(&said), said: name(said) })
        }
        let right = plan.answer();
        let parts = [
            part("layer", self.layer, |said| *said == right.layer),
            part("service", self.service, |said| *said == right.service),
            part("who", self.who, |said| *said == right.who),
            part("which", self.which, |said| *said == right.which),
            part("cure", self.cure, |said| plan.is_cure(*said)),
        ];
        parts.into_iter().flatten().collect()
    }

    /// As the command line writes it, for a program that takes the same options.
    pub fn options(&self) -> Vec<String> {
        let options = [
            self.layer.map(|said| format!("--layer={}", name(said))),
            self.service.map(|said| format!("--service={}", name(said))),
            self.who.map(|said| format!("--who={}", name(said))),
            self.which.map(|said| format!("--which={}", name(said))),
            self.cure.map(|said| format!("--cure={}", name(said))),
        ];
        options.into_iter().flatten().collect()
    }
}

impl From<IncidentAnswer> for SaidAnswer {
    fn from(answer: IncidentAnswer) -> SaidAnswer {
        SaidAnswer {
            layer: Some(answer.layer),
            service: Some(answer.service),
            who: Some(answer.who),
            which: Some(answer.which),
            cure: Some(answer.cure),
        }
    }
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// A cgroup's io.max.
    IoMax,
    /// A cgroup's memory.max.
    MemoryMax,
    /// A device that takes one I/O at a time.
    OneTag,
    /// A queue of four requests.
    FewRequests,
    /// A scheduler that waits for the next I/O of each thread.
    Idling,
    /// A disk that is slow with each I/O.
    SlowDisk,
    /// One leg of a mirror is slow with each write.
    SlowLeg,
    /// A range of sectors behind dm-delay.
    SlowRange,
    /// All sectors behind dm-delay, for writes only.
    SlowWrites,
    /// A cgroup's cpu.max.
    CpuMax,
    /// No readahead.
    NoReadahead,
    /// A process that empties the page cache.
    EmptiedCache,
    /// A copy whose writeback fills the queue.
    Writeback,
    /// A real-time thread that takes the CPUs.
    RealTime,
    /// Many threads that call fsync.
    Flushes,
    /// A copy that reads with many threads.
    Reading,
    /// More requests to the service than its disk can take.
    Overload,
    /// A range of sectors behind dm-flakey.
    Errors,
}

/// An incident.
#[derive(Clone, Copy, Debug)]
pub struct IncidentPlan {
    /// What is wrong.
    pub fault: Fault,
    /// Whom it makes slow.
    pub service: Service,
    /// How bad it is, from 0 to 99: each fault makes of it what it needs.
    pub strength: u64,
    /// Which of its I/Os, where the fault can tell them apart.
    pub which: Which,
    /// The disk of the slow service as it was bought.
    pub sheet: Model,
    /// By service: what its device of device mapper consists of, while all is well.
    pub layouts: [Layout; 3],
    /// Something odd that makes nothing slow.
    pub distractor: Option<Distractor>,
}

/// How quick a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// How long it has each I/O.
    pub ms: u64,
    /// How many it takes at once.
    pub tags: u64,
}

/// The disk below a service's device of device mapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    /// QEMU's virtio disk.
    Virtio,
    /// QEMU's NVMe disk.
    Nvme,
    /// One in memory, with a timer.
    Timer(Model),
}

/// The table of a service's device of device mapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// One disk.
    Linear,
    /// Two disks, of which each gets all writes.
    Mirror,
    /// A delay of no time.
    Delay,
}

/// What the file system of a service stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The disk.
    pub below: Below,
    /// What device mapper makes of it.
    pub table: Table,
}

/// What is unusual and harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distractor {
    /// Another service's cgroup has a limit that it never reaches.
    Limit,
    /// Another disk's readahead is twice the usual.
    Readahead,
    /// A process at the lowest priority uses what CPU is left.
    Nice,
}

/// Numbers that a seed determines: SplitMix64, the same everywhere.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next one, below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// One of these.
    pub fn one_of<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len() as u64) as usize]
    }
}

impl Model {
    /// Disks on which a service is as quick as it should be.
    const QUICK: [Model; 4] = [
        Model { ms: 2, tags: 64 },
        Model { ms: 5, tags: 16 },
        Model { ms: 8, tags: 4 },
        Model { ms: 5, tags: 1 },
    ];

    /// A disk on which this fault shows. Other faults have it, too: the data sheet tells none.
    fn of(fault: Fault, numbers: &mut Numbers) -> Model {
        use Fault::*;
        // Too slow to take one I/O at a time, but not to take several.
        let slow = Model { ms: 40 + numbers.below(11), tags: 64 };
        // The same for four at a time.
        let slower = Model { ms: 150 + numbers.below(16), tags: 64 };
        let [quick, medium, few, one] = Model::QUICK;
        let models: &[Model] = match fault {
            OneTag => &[slow],
            FewRequests => &[slower],
            Writeback => &[one],
            Flushes | Reading | Overload => &[few],
            Idling => &[quick, medium, few],
            // A list without readahead is many I/Os, one after the other.
            NoReadahead => &[quick, medium],
            // What is missing has to cost something, and must not wait for a disk that takes too few at once.
            MemoryMax | EmptiedCache => &[medium],
            // Who waits for a tag needs a CPU to take it: with few of them, the wait would be for both.
            CpuMax | RealTime => &[quick, medium, slow],
            // A slow disk that takes few at once would let the others wait for it.
            SlowDisk => &[quick, slow, slower],
            SlowLeg => &[quick, medium, slow],
            Errors => &[quick, medium, few, one, slow],
            SlowRange => &[quick, medium, few, one, slow, slow],
            // Of all I/Os' time, the few that are slow must have most.
            IoMax | SlowWrites => &[quick, medium, few, one, quick, medium],
        };
        numbers.one_of(models)
    }
}

impl Layout {
    /// The slow service is always on a disk with a timer, and each of the others on a disk of another kind. What
    /// stands in a table where nothing is wrong stands there with faults that it has nothing to do with, too.
    fn of_services(
        fault: Fault,
        service: Service,
        sheet: Model,
        numbers: &mut Numbers,
    ) -> [Layout; 3] {
        use Fault::*;
        let mut kinds =
            vec![Below::Virtio, Below::Nvme, Below::Timer(numbers.one_of(&Model::QUICK))];
        Service::ALL.map(|one| {
            if one == service {
                let table = match fault {
                    SlowLeg => Table::Mirror,
                    // Of a mirror's writes, the tools do not know the parts: where a part is to be found, there is none.
                    MemoryMax | NoReadahead | EmptiedCache => {
                        numbers.one_of(&[Table::Linear, Table::Mirror])
                    }
                    _ => Table::Linear,
                };
                return Layout { below: Below::Timer(sheet), table };
            }
            let below = kinds.remove(numbers.below(kinds.len() as u64) as usize);
            let table = numbers.one_of(&[Table::Linear, Table::Mirror, Table::Delay]);
            Layout { below, table }
        })
    }
}

impl IncidentPlan {
    /// The incident of a seed.
    pub fn from_seed(seed: u64, level: u8) -> IncidentPlan {
        use Fault::*;
        let mut numbers = Numbers(seed);
        let fault = numbers.one_of(Fault::value_variants());
        let service = numbers.one_of(&Service::ALL);
        let which = match fault {
            IoMax => numbers.one_of(&[Which::Reads, Which::Writes]),
            SlowLeg | SlowWrites => Which::Writes,
            MemoryMax | NoReadahead | EmptiedCache => Which::Reads,
            SlowRange | Errors => Which::Range,
            _ => Which::All,
        };
        let strength = numbers.below(100);
        let sheet = Model::of(fault, &mut numbers);
        let layouts = Layout::of_services(fault, service, sheet, &mut numbers);
        let distractors = [Distractor::Limit, Distractor::Readahead, Distractor::Nice];
        let distractor = (level == 3).then(|| numbers.one_of(&distractors));
        IncidentPlan { fault, service, strength, which, sheet, layouts, distractor }
    }

    /// Between two numbers, by how bad it is.
    pub fn between(&self, least: u64, most: u64) -> u64 {
        least + (most - least) * self.strength / 99
    }

    /// The disk of the slow service, with a fault or without.
    pub fn disk(&self, fault: Option<Fault>) -> Model {
        match fault {
            Some(Fault::OneTag) => Model { tags: 1, ..self.sheet },
            Some(Fault::SlowDisk) => Model { ms: self.between(380, 500), ..self.sheet },
            _ => self.sheet,
        }
    }

    /// A service that is not the slow one, with which the oddity is.
    pub fn quick_service(&self) -> Service {
        Service::ALL[(self.service as usize + 1) % 3]
    }

    /// Whether this removes the cause. A leg that is slow can be replaced, or taken out of the table.
    pub fn is_cure(&self, cure: Cure) -> bool {
        cure == self.answer().cure || (self.fault == Fault::SlowLeg && cure == Cure::Table)
    }

    /// The right answer.
    pub fn answer(&self) -> IncidentAnswer {
        let (layer, who, cure) = match self.fault {
            Fault::IoMax => (Layer::Wait, Who::Nobody, Cure::IoLimit),
            Fault::MemoryMax => (Layer::PageCache, Who::Nobody, Cure::MemoryLimit),
            Fault::OneTag => (Layer::Wait, Who::Nobody, Cure::QueueDepth),
            Fault::FewRequests => (Layer::Wait, Who::Nobody, Cure::NrRequests),
            Fault::Idling => (Layer::Queue, Who::Nobody, Cure::Scheduler),
            Fault::SlowDisk | Fault::SlowLeg => (Layer::Device, Who::Nobody, Cure::Disk),
            Fault::SlowRange | Fault::SlowWrites => (Layer::Mapper, Who::Nobody, Cure::Table),
            Fault::CpuMax => (Layer::Cpu, Who::Nobody, Cure::CpuLimit),
            Fault::NoReadahead => (Layer::PageCache, Who::Nobody, Cure::Readahead),
            Fault::EmptiedCache => (Layer::PageCache, Who::Tidyd, Cure::Cache),
            Fault::Writeback => (Layer::Queue, Who::Backupd, Cure::Copying),
            Fault::RealTime => (Layer::Cpu, Who::Sensord, Cure::Priority),
            Fault::Flushes => (Layer::Wait, Who::Reportd, Cure::Flushes),
            Fault::Reading => (Layer::Wait, Who::Backupd, Cure::Copying),
            Fault::Overload => (Layer::Wait, Who::Itself, Cure::Load),
            Fault::Errors => (Layer::Errors, Who::Nobody, Cure::Table),
        };
        IncidentAnswer { layer, service: self.service, who, which: self.which, cure }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_seeds() {
        for fault in Fault::value_variants() {
            assert!(
                (0..200).any(|seed| IncidentPlan::from_seed(seed, 2).fault == *fault),
                "{fault:?}"
            );
        }
    }

    /// How often each of these occurs.
    fn counts<T: PartialEq>(of: impl Iterator<Item = T>) -> Vec<(T, usize)> {
        let mut counts: Vec<(T, usize)> = Vec::new();
        for one in of {
            match counts.iter_mut().find(|(it, _)| *it == one) {
                Some((_, count)) => *count += 1,
                None => counts.push((one, 1)),
            }
        }
        counts
    }

    fn plans(seeds: u64) -> Vec<IncidentPlan> {
        (0..seeds).map(|seed| IncidentPlan::from_seed(seed, 2)).collect()
    }

    #[test]
    fn the_service_tells_nothing() {
        let plans = plans(1000);
        for (service, count) in counts(plans.iter().map(|plan| plan.service)) {
            assert!((250..=420).contains(&count), "{service:?}: {count} of 1000");
        }
        for fault in Fault::value_variants() {
            let of_fault = plans.iter().filter(|plan| plan.fault == *fault);
            let services = counts(of_fault.map(|plan| plan.service));
            assert_eq!(services.len(), 3, "{fault:?}: {services:?}");
        }
    }

    #[test]
    fn neither_the_data_sheet_nor_the_layout_tells_the_layer() {
        let plans = plans(2000);
        let model = |plan: &IncidentPlan| (plan.sheet.tags, plan.sheet.ms / 20);
        let own = |plan: &IncidentPlan| plan.layouts[plan.service as usize].table;
        for (sheet, _) in counts(plans.iter().map(model)) {
            let with = plans.iter().filter(|plan| model(plan) == sheet);
            let layers = counts(with.map(|plan| plan.answer().layer));
            assert!(layers.len() >= 2, "{sheet:?}: {layers:?}");
        }
        for (table, _) in counts(plans.iter().map(own)) {
            let with = plans.iter().filter(|plan| own(plan) == table);
            assert!(counts(with.map(|plan| plan.fault)).len() >= 4, "{table:?}");
        }
        // Of the other services, nothing depends on the fault.
        for fault in Fault::value_variants() {
            let of_fault = plans.iter().filter(|plan| plan.fault == *fault);
            let others = of_fault.flat_map(|plan| {
                let own = plan.service as usize;
                let others = (0..3).filter(move |other| *other != own);
                others.map(|other| {
                    (std::mem::discriminant(&plan.layouts[other].below), plan.layouts[other].table)
                })
            });
            assert_eq!(counts(others).len(), 9, "{fault:?}");
        }
    }

    #[test]
    fn one_answer_to_all_is_rarely_right() {
        let answers = counts(plans(1000).iter().map(IncidentPlan::answer));
        let often = answers.iter().map(|(_, count)| *count).max();
        assert!(often < Some(100), "{often:?} of 1000");
    }

    #[test]
    fn what_is_often_right_is_rarely_right_at_once() {
        let mut numbers = Numbers(0);
        let mut any = || IncidentAnswer {
            layer: numbers.one_of(Layer::value_variants()),
            service: numbers.one_of(&Service::ALL),
            who: numbers.one_of(Who::value_variants()),
            which: numbers.one_of(Which::value_variants()),
            cure: numbers.one_of(Cure::value_variants()),
        };
        let right =
            (0..10_000).filter(|&seed| IncidentPlan::from_seed(seed, 2).answer() == any()).count();
        assert!(right < 10, "{right} of 10000 random answers are right");
        // Whoever knows how often each part is right, and takes the likeliest of each.
        let plans = plans(300);
        let likely = plans.iter().map(IncidentPlan::answer).max_by_key(|one| {
            let said = SaidAnswer::from(*one);
            let is_right = |plan: &IncidentPlan, part: usize| said.judged(plan)[part].is_right;
            let count = |part: usize| plans.iter().filter(|plan| is_right(plan, part)).count();
            (0..PARTS).map(count).product::<usize>()
        });
        let right = plans.iter().filter(|plan| Some(plan.answer()) == likely).count();
        assert!(right < 30, "{likely:?} is right {right} times in 300");
    }

    #[test]
    fn parts_of_an_answer_are_judged_by_themselves() {
        let of = |fault| {
            let plans = plans(200);
            plans.into_iter().find(|plan| plan.fault == fault).expect("each fault has seeds")
        };
        let said = SaidAnswer {
            layer: Some(Layer::Device),
            cure: Some(Cure::Table),
            ..SaidAnswer::default()
        };
        let judged =
            |fault| said.judged(&of(fault)).iter().map(|part| part.is_right).collect::<Vec<_>>();
        assert_eq!(judged(Fault::SlowLeg), [true, true]);
        assert_eq!(judged(Fault::SlowDisk), [true, false]);
        assert_eq!(judged(Fault::SlowRange), [false, true]);
        assert!(SaidAnswer::default().judged(&of(Fault::IoMax)).is_empty());
        assert_eq!(said.options(), ["--layer=device", "--cure=table"]);
    }

    #[test]
    fn a_level_changes_the_oddity_only() {
        for seed in 0..50 {
            let (second, third) =
                (IncidentPlan::from_seed(seed, 2), IncidentPlan::from_seed(seed, 3));
            assert_eq!(second.answer(), third.answer());
            assert_eq!((second.sheet, second.layouts), (third.sheet, third.layouts));
            assert!(second.distractor.is_none() && third.distractor.is_some());
        }
    }
}
