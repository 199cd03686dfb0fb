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

/// What a learner says it is, and what it is.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[group(id = "said")]
pub struct IncidentAnswer {
    /// Where the time is lost
    #[arg(long)]
    pub layer: Layer,
    /// Whose disk it is: the service's that is slow
    #[arg(long)]
    pub service: Service,
    /// The process that has to be stopped or limited
    #[arg(long)]
    pub who: Who,
    /// Which of the service's I/Os are slow
    #[arg(long)]
    pub which: Which,
    /// What would remove the cause
    #[arg(long)]
    pub cure: Cure,
}

impl IncidentAnswer {
    /// Each part: what it is about, what it says, and whether that is right.
    pub fn judged(&self, right: &IncidentAnswer) -> [(&'static str, String, bool); 5] {
        [
            ("layer", name(self.layer), self.layer == right.layer),
            ("service", name(self.service), self.service == right.service),
            ("who", name(self.who), self.who == right.who),
            ("which", name(self.which), self.which == right.which),
            ("cure", name(self.cure), self.cure == right.cure),
        ]
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
    /// Something odd that makes nothing slow.
    pub distractor: Option<Distractor>,
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

impl IncidentPlan {
    /// The incident of a seed.
    pub fn from_seed(seed: u64, level: u8) -> IncidentPlan {
        use {Fault::*, Service::*};
        let mut numbers = Numbers(seed);
        let fault = numbers.one_of(Fault::value_variants());
        let service = match fault {
            SlowRange | SlowWrites | SlowLeg | Errors => Shop,
            OneTag | FewRequests | Idling | SlowDisk | Writeback | Flushes | Reading | Overload
            | NoReadahead => Mail,
            IoMax | MemoryMax | CpuMax | EmptiedCache => numbers.one_of(&Service::ALL),
            RealTime => Web,
        };
        let which = match fault {
            IoMax => numbers.one_of(&[Which::Reads, Which::Writes]),
            SlowLeg | SlowWrites => Which::Writes,
            MemoryMax | NoReadahead | EmptiedCache => Which::Reads,
            SlowRange | Errors => Which::Range,
            _ => Which::All,
        };
        let distractors = [Distractor::Limit, Distractor::Readahead, Distractor::Nice];
        let strength = numbers.below(100);
        let distractor = (level == 3).then(|| numbers.one_of(&distractors));
        IncidentPlan { fault, service, strength, which, distractor }
    }

    /// Between two numbers, by how bad it is.
    pub fn between(&self, least: u64, most: u64) -> u64 {
        least + (most - least) * self.strength / 99
    }

    /// The disk of maild: how long it has each I/O in ms, and how many it takes at once.
    pub fn mail_disk(&self, fault: Option<Fault>) -> (u64, u64) {
        match fault {
            Some(Fault::OneTag) => (self.between(40, 50), 1),
            Some(Fault::FewRequests) => (self.between(160, 220), 64),
            Some(Fault::SlowDisk) => (self.between(280, 450), 64),
            Some(Fault::Writeback) => (self.between(5, 6), 1),
            Some(Fault::Flushes | Fault::Reading) => (self.between(7, 9), 4),
            Some(Fault::Overload) => (self.between(20, 30), 4),
            _ => (2, 64),
        }
    }

    /// The disk of maild as it was bought: ms for each I/O, and I/Os at once.
    pub fn data_sheet(&self) -> (u64, u64) {
        self.mail_disk(Some(self.fault).filter(|fault| *fault != Fault::SlowDisk))
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

    #[test]
    fn one_answer_to_all_is_rarely_right() {
        let answers: Vec<IncidentAnswer> =
            (0..1000).map(|seed| IncidentPlan::from_seed(seed, 2).answer()).collect();
        let often = answers.iter().map(|one| answers.iter().filter(|it| *it == one).count()).max();
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
        let answers: Vec<IncidentAnswer> =
            (0..300).map(|seed| IncidentPlan::from_seed(seed, 2).answer()).collect();
        let likely = answers.iter().copied().max_by_key(|one| {
            let count = |part: usize| answers.iter().filter(|it| one.judged(it)[part].2).count();
            (0..5).map(count).product::<usize>()
        });
        let right = answers.iter().filter(|it| Some(**it) == likely).count();
        assert!(right < 30, "{likely:?} is right {right} times in 300");
    }

    #[test]
    fn a_level_changes_the_oddity_only() {
        for seed in 0..50 {
            let (second, third) =
                (IncidentPlan::from_seed(seed, 2), IncidentPlan::from_seed(seed, 3));
            assert_eq!(second.answer(), third.answer());
            assert!(second.distractor.is_none() && third.distractor.is_some());
        }
    }
}
