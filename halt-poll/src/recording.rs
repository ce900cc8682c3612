//! Recorded halts: the file of `pollux run --record`, written and read. Its form, byte by byte, is in
//! `docs/recording.md`.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

use crate::{Outcome, Params, WakeReason};

/// What a file begins with.
pub const MAGIC: [u8; 8] = *b"PLXHALTS";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of a block's own header.
pub const BLOCK_BYTES: usize = 24;
/// Bytes of a halt.
pub const HALT_BYTES: usize = 32;
/// A block of halts; a reader passes over blocks of other kinds.
const KIND_HALTS: u32 = 1;
/// What a block begins with.
const BLOCK_MAGIC: u32 = u32::from_le_bytes(*b"HBLK");
/// A machine has no more vCPUs than 32-bit APIC identifiers of KVM allow.
const VCPUS_MAX: u32 = 4096;
/// A recording that is read may have no more halts: 2 GiB of them.
const HALTS_MAX: u64 = 1 << 26;

/// Who polled for halted vCPUs while it was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// KVM.
    Kernel,
    /// The program that recorded, with this crate's poller.
    User,
}

/// How the guest was told to idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestIdle {
    /// Nothing was said.
    Default,
    /// By its haltpoll driver.
    Haltpoll,
    /// By HLT at once.
    Halt,
    /// By polling, without HLT.
    Poll,
}

/// How it was when the recording began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Who polled.
    pub mode: Mode,
    /// How many vCPUs there were.
    pub vcpus: u32,
    /// The host's parameters.
    pub host: Params,
    /// How the guest was told to idle.
    pub guest_idle: GuestIdle,
    /// How long before a timer's deadline a sleeper woke, in nanoseconds, to spin through the rest:
    /// [`Poller::deadline_lead_ns`](crate::Poller::deadline_lead_ns).
    pub deadline_lead_ns: u32,
}

/// What ended a halt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// It could not be told.
    Unknown,
    /// A device's interrupt.
    Device,
    /// An interrupt of another vCPU.
    Ipi,
    /// The vCPU's own timer.
    Timer,
    /// Nothing of the guest's: the thread was wanted.
    Interrupted,
    /// An event without a vector (NMI, INIT).
    Other,
}

impl Source {
    /// All of them, by their numbers in the file.
    pub const ALL: [Source; 6] = [
        Source::Unknown,
        Source::Device,
        Source::Ipi,
        Source::Timer,
        Source::Interrupted,
        Source::Other,
    ];

    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Source::Unknown => "unknown",
            Source::Device => "device",
            Source::Ipi => "ipi",
            Source::Timer => "timer",
            Source::Interrupted => "interrupted",
            Source::Other => "other",
        }
    }
}

/// One halt of one vCPU. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Halt {
    /// When it began, since the VM was assembled.
    pub start_ns: u64,
    /// From its beginning until the vCPU's thread ran again: polling and sleeping.
    pub halt_ns: u64,
    /// How much of it was polled, or `None` if it did not poll. At most `u32::MAX`.
    pub polled_ns: Option<u32>,
    /// Whether it slept.
    pub slept: bool,
    /// The window it began with. 0 while polling was not allowed.
    pub window_ns: u32,
    /// If it slept: from the wake event until the thread ran again, at the end of `halt_ns`.
    /// `None`: not known.
    pub wake_cost_ns: Option<u32>,
    /// Whether the wake was valid.
    pub valid: bool,
    /// Whether the guest let the host poll (`MSR_KVM_POLL_CONTROL`); its haltpoll driver does not.
    pub poll_allowed: bool,
    /// What ended it.
    pub source: Source,
    /// The interrupt's vector; 0 if there was none, or it is not known.
    pub vector: u8,
}

const POLLED: u8 = 1 << 0;
const SLEPT: u8 = 1 << 1;
const VALID: u8 = 1 << 2;
const POLL_ALLOWED: u8 = 1 << 3;
const WAKE_COST_KNOWN: u8 = 1 << 4;

impl Halt {
    /// A halt of this crate's poller that began at `start_ns` with this window.
    pub fn new(start_ns: u64, window_ns: u64, outcome: &Outcome) -> Self {
        Halt {
            start_ns,
            halt_ns: outcome.halt_ns(),
            polled_ns: outcome.polled_ns.map(saturated),
            slept: outcome.blocked_ns.is_some(),
            window_ns: saturated(window_ns),
            wake_cost_ns: None,
            valid: outcome.valid,
            poll_allowed: true,
            source: match outcome.wake {
                WakeReason::Event => Source::Unknown,
                WakeReason::Deadline => Source::Timer,
                WakeReason::Interrupted => Source::Interrupted,
            },
            vector: 0,
        }
    }

    /// As it stands in the file.
    pub fn to_bytes(&self) -> [u8; HALT_BYTES] {
        let mut flags = 0;
        for (set, flag) in [
            (self.polled_ns.is_some(), POLLED),
            (self.slept, SLEPT),
            (self.valid, VALID),
            (self.poll_allowed, POLL_ALLOWED),
            (self.wake_cost_ns.is_some(), WAKE_COST_KNOWN),
        ] {
            flags |= if set { flag } else { 0 };
        }
        let mut bytes = Writer::<HALT_BYTES>::new();
        bytes.u64(self.start_ns);
        bytes.u64(self.halt_ns);
        bytes.u32(self.polled_ns.unwrap_or(0));
        bytes.u32(self.window_ns);
        bytes.u32(self.wake_cost_ns.unwrap_or(0));
        bytes.bytes(&[flags, self.source as u8, self.vector]);
        bytes.0
    }

    /// Reads what [`to_bytes`](Self::to_bytes) gave. A number that stands for no source is
    /// [`Source::Unknown`]: later writers may know more.
    pub fn from_bytes(bytes: &[u8; HALT_BYTES]) -> Self {
        let mut bytes = Fields(bytes);
        let (start_ns, halt_ns) = (bytes.u64(), bytes.u64());
        let (polled_ns, window_ns, wake_cost_ns) = (bytes.u32(), bytes.u32(), bytes.u32());
        let (flags, source, vector) = (bytes.u8(), bytes.u8(), bytes.u8());
        let has = |flag| flags & flag != 0;
        Halt {
            start_ns,
            halt_ns,
            polled_ns: has(POLLED).then_some(polled_ns),
            slept: has(SLEPT),
            window_ns,
            wake_cost_ns: has(WAKE_COST_KNOWN).then_some(wake_cost_ns),
            valid: has(VALID),
            poll_allowed: has(POLL_ALLOWED),
            source: Source::ALL.get(usize::from(source)).copied().unwrap_or(Source::Unknown),
            vector,
        }
    }

    /// How long it slept, in nanoseconds.
    pub fn blocked_ns(&self) -> u64 {
        let polled_ns = u64::from(self.polled_ns.unwrap_or(0));
        if self.slept { self.halt_ns.saturating_sub(polled_ns) } else { 0 }
    }
}

/// At most what 32 bits hold.
pub fn saturated(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

impl Header {
    /// As it stands at the beginning of the file.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mode = match self.mode {
            Mode::Kernel => 0,
            Mode::User => 1,
        };
        let idle = match self.guest_idle {
            GuestIdle::Default => 0,
            GuestIdle::Haltpoll => 1,
            GuestIdle::Halt => 2,
            GuestIdle::Poll => 3,
        };
        let mut bytes = Writer::<HEADER_BYTES>::new();
        bytes.bytes(&MAGIC);
        bytes.u32(VERSION);
        bytes.u32(HEADER_BYTES as u32);
        bytes.u32(self.vcpus);
        bytes.bytes(&[mode, idle, 0, 0]);
        let Params { max_ns, grow, grow_start_ns, shrink } = self.host;
        for number in [max_ns, grow, grow_start_ns, shrink, self.deadline_lead_ns] {
            bytes.u32(number);
        }
        bytes.0
    }

    fn read(input: &mut impl Read) -> Result<Self, ReadError> {
        let mut bytes = [0; HEADER_BYTES];
        if read_whole(input, &mut bytes)? < HEADER_BYTES {
            return Err(ReadError::NotARecording);
        }
        let mut fields = Fields(&bytes);
        if fields.array::<8>() != MAGIC {
            return Err(ReadError::NotARecording);
        }
        let version = fields.u32();
        if version != VERSION {
            return Err(ReadError::Version(version));
        }
        let broken = |what| ReadError::Broken { at: 0, what };
        if fields.u32() != HEADER_BYTES as u32 {
            return Err(broken("the header has another length"));
        }
        let vcpus = fields.u32();
        if vcpus == 0 || vcpus > VCPUS_MAX {
            return Err(broken("no such number of vCPUs"));
        }
        let mode = match fields.u8() {
            0 => Mode::Kernel,
            1 => Mode::User,
            _ => return Err(broken("no such mode")),
        };
        let guest_idle = match fields.u8() {
            0 => GuestIdle::Default,
            1 => GuestIdle::Haltpoll,
            2 => GuestIdle::Halt,
            3 => GuestIdle::Poll,
            _ => return Err(broken("no such way to idle")),
        };
        fields.array::<2>();
        let [max_ns, grow, grow_start_ns, shrink, deadline_lead_ns] =
            [(); 5].map(|()| fields.u32());
        let host = Params { max_ns, grow, grow_start_ns, shrink };
        Ok(Header { mode, vcpus, host, guest_idle, deadline_lead_ns })
    }
}

/// The header of a block of `halts` halts of one vCPU; `lost` were dropped before it.
pub fn block_header(vcpu: u32, halts: u32, lost: u64) -> [u8; BLOCK_BYTES] {
    let mut bytes = Writer::<BLOCK_BYTES>::new();
    bytes.u32(BLOCK_MAGIC);
    bytes.bytes(&(KIND_HALTS as u16).to_le_bytes());
    bytes.bytes(&(vcpu as u16).to_le_bytes());
    bytes.u32(halts.saturating_mul(HALT_BYTES as u32));
    bytes.u32(halts);
    bytes.u64(lost);
    bytes.0
}

/// All halts of a run, as far as they were written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// How it was when it began.
    pub header: Header,
    /// The halts of each vCPU, in their order.
    pub vcpus: Vec<Vec<Halt>>,
    /// Halts that were not written, because they came faster or there was no more room.
    pub lost: u64,
    /// The file ends within a block: its writer was killed.
    pub truncated: bool,
}

/// Why there is no [`Recording`].
#[derive(Debug)]
pub enum ReadError {
    /// The file cannot be read.
    Io(io::Error),
    /// It is something else.
    NotARecording,
    /// It was written by another version of this program.
    Version(u32),
    /// It is not as it was written.
    Broken {
        /// Byte of the file.
        at: u64,
        /// What is wrong there.
        what: &'static str,
    },
}

impl std::error::Error for ReadError {}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        ReadError::Io(error)
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Io(error) => error.fmt(f),
            ReadError::NotARecording => f.write_str("not a recording of halts"),
            ReadError::Version(version) => {
                write!(f, "a recording of version {version}, where only {VERSION} can be read")
            }
            ReadError::Broken { at, what } => write!(f, "broken at byte {at}: {what}"),
        }
    }
}

impl Recording {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// It cannot be read, or is no recording. A file that merely ends too early is one: see
    /// [`truncated`](Self::truncated).
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        Self::read_from(BufReader::new(File::open(path)?))
    }

    /// Reads a recording to its end. Takes no more memory than twice what was read.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_from(mut input: impl Read) -> Result<Self, ReadError> {
        let header = Header::read(&mut input)?;
        let vcpus = vec![Vec::new(); header.vcpus as usize];
        let mut recording = Recording { header, vcpus, lost: 0, truncated: false };
        let (mut at, mut halts) = (HEADER_BYTES as u64, 0);
        loop {
            let broken = |what| ReadError::Broken { at, what };
            let mut head = [0; BLOCK_BYTES];
            let length = read_whole(&mut input, &mut head)?;
            if length < BLOCK_BYTES {
                recording.truncated = length > 0;
                break;
            }
            let mut fields = Fields(&head);
            if fields.u32() != BLOCK_MAGIC {
                return Err(broken("no block begins here"));
            }
            let (kind, vcpu) = (fields.u16(), usize::from(fields.u16()));
            let (bytes, count, lost) = (fields.u32(), fields.u32(), fields.u64());
            if u32::from(kind) != KIND_HALTS {
                let passed = io::copy(&mut (&mut input).take(bytes.into()), &mut io::sink())?;
                if passed < bytes.into() {
                    recording.truncated = true;
                    break;
                }
            } else {
                if u64::from(bytes) != u64::from(count) * HALT_BYTES as u64 {
                    return Err(broken("a block's length is not that of its halts"));
                }
                let vcpu = recording.vcpus.get_mut(vcpu).ok_or(broken("no such vCPU"))?;
                halts += u64::from(count);
                if halts > HALTS_MAX {
                    return Err(broken("more halts than can be read"));
                }
                recording.lost = recording.lost.saturating_add(lost);
                for _ in 0..count {
                    let mut halt = [0; HALT_BYTES];
                    if read_whole(&mut input, &mut halt)? < HALT_BYTES {
                        recording.truncated = true;
                        return Ok(recording);
                    }
                    vcpu.push(Halt::from_bytes(&halt));
                }
            }
            at = at.saturating_add(BLOCK_BYTES as u64 + u64::from(bytes));
        }
        Ok(recording)
    }

    /// How many halts there are.
    pub fn halts(&self) -> usize {
        self.vcpus.iter().map(Vec::len).sum()
    }

    /// All halts, those of one vCPU after those of another.
    pub fn iter(&self) -> impl Iterator<Item = &Halt> {
        self.vcpus.iter().flatten()
    }

    /// Leaves the halts that began from `from_ns` to before `until_ns`, in nanoseconds since the VM
    /// was assembled.
    #[must_use]
    pub fn between(mut self, from_ns: u64, until_ns: u64) -> Self {
        for halts in &mut self.vcpus {
            halts.retain(|halt| (from_ns..until_ns).contains(&halt.start_ns));
        }
        self
    }

    /// How many halts began while the guest polled by itself before it halted. How long it was idle
    /// then is not in the recording, and idle times that it polled away are not either.
    pub fn after_guest_polling(&self) -> usize {
        self.iter().filter(|halt| !halt.poll_allowed).count()
    }

    /// The median of what waking cost, in nanoseconds, over the halts that slept, were woken by an
    /// event and tell it. `None`: there are none.
    pub fn wake_cost_ns(&self) -> Option<u32> {
        let mut costs: Vec<u32> = self.iter().filter_map(|halt| halt.wake_cost_ns).collect();
        costs.sort_unstable();
        costs.get(costs.len() / 2).copied()
    }
}

/// Reads until `buffer` is full or the input ends; gives how much it read.
fn read_whole(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while let Some(rest) = buffer.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Fields, little-endian, one after the other. What is not filled stays 0.
struct Writer<const N: usize>([u8; N], usize);

impl<const N: usize> Writer<N> {
    fn new() -> Self {
        Writer([0; N], 0)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(self.1).zip(bytes) {
            *to = *from;
        }
        self.1 += bytes.len();
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}

/// Fields as they are read; zeros after the last one.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => [0; N],
        }
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: Header = Header {
        mode: Mode::User,
        vcpus: 2,
        host: Params { max_ns: 1, grow: 2, grow_start_ns: 3, shrink: 4 },
        guest_idle: GuestIdle::Halt,
        deadline_lead_ns: 5,
    };

    fn halts() -> impl Strategy<Value = Halt> {
        let times = (any::<u64>(), any::<u64>(), any::<Option<u32>>(), any::<u32>());
        let rest = (any::<Option<u32>>(), any::<[bool; 3]>(), 0..6usize, any::<u8>());
        (times, rest).prop_map(|(times, rest)| {
            let (start_ns, halt_ns, polled_ns, window_ns) = times;
            let (wake_cost_ns, [slept, valid, poll_allowed], source, vector) = rest;
            let source = Source::ALL[source];
            Halt {
                start_ns,
                halt_ns,
                polled_ns,
                slept,
                window_ns,
                wake_cost_ns,
                valid,
                poll_allowed,
                source,
                vector,
            }
        })
    }

    /// A file with these blocks: vCPU, halts before them that were lost, halts.
    fn file(blocks: &[(u32, u64, Vec<Halt>)]) -> Vec<u8> {
        let mut bytes = HEADER.to_bytes().to_vec();
        for (vcpu, lost, halts) in blocks {
            bytes.extend(block_header(*vcpu, halts.len() as u32, *lost));
            bytes.extend(halts.iter().flat_map(Halt::to_bytes));
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Recording, ReadError> {
        Recording::read_from(bytes)
    }

    fn a_halt() -> Halt {
        let outcome = Outcome {
            polled_ns: Some(7),
            blocked_ns: Some(9),
            wake: WakeReason::Deadline,
            valid: true,
        };
        Halt::new(3, 7, &outcome)
    }

    #[test]
    fn the_bytes_are_those_of_the_documentation() {
        let halt = Halt { wake_cost_ns: Some(0x0102), vector: 0xec, ..a_halt() };
        let expected = [
            [3, 0, 0, 0, 0, 0, 0, 0],
            [16, 0, 0, 0, 0, 0, 0, 0],
            [7, 0, 0, 0, 7, 0, 0, 0],
            [2, 1, 0, 0, 0b11111, 3, 0xec, 0],
        ];
        assert_eq!(halt.to_bytes(), expected.concat()[..]);
        let block = block_header(1, 2, 3);
        assert_eq!(block[..8], *b"HBLK\x01\0\x01\0");
        assert_eq!(block[8..], [64, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        let header = HEADER.to_bytes();
        assert_eq!(header[..16], *b"PLXHALTS\x01\0\0\0\x40\0\0\0");
        assert_eq!(header[16..28], [2, 0, 0, 0, 1, 2, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn what_was_lost_is_added_up_and_other_blocks_are_passed_over() {
        let mut bytes = file(&[(0, 3, vec![a_halt()]), (1, 4, vec![])]);
        let mut other = block_header(0, 1, 9);
        other[4] = 77;
        bytes.extend(other);
        bytes.extend([0xff; HALT_BYTES]);
        bytes.extend(block_header(1, 0, 5));
        let recording = read(&bytes).unwrap();
        assert_eq!((recording.lost, recording.halts(), recording.truncated), (12, 1, false));
    }

    #[test]
    fn other_versions_and_other_files_are_refused_in_words() {
        let told = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        let good = file(&[(0, 0, vec![a_halt()])]);
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            bytes
        };
        assert!(told(b"").contains("not a recording"));
        assert!(told(&good[..HEADER_BYTES - 1]).contains("not a recording"));
        assert!(told(&with(0, b'X')).contains("not a recording"));
        assert!(told(&with(8, 2)).contains("version 2"));
        assert!(told(&with(12, 65)).contains("another length"));
        assert!(told(&with(16, 0)).contains("number of vCPUs"));
        assert!(told(&with(19, 0xff)).contains("number of vCPUs"));
        assert!(told(&with(20, 2)).contains("no such mode"));
        assert!(told(&with(21, 4)).contains("way to idle"));
        assert!(told(&with(HEADER_BYTES, 0)).contains("byte 64: no block"));
        assert!(told(&with(HEADER_BYTES + 6, 2)).contains("no such vCPU"));
        assert!(told(&with(HEADER_BYTES + 12, 2)).contains("length"));
    }

    #[test]
    fn a_block_that_claims_more_than_there_is_costs_no_memory() {
        let mut bytes = HEADER.to_bytes().to_vec();
        bytes.extend(block_header(0, 60_000_000, 0));
        bytes.extend(a_halt().to_bytes());
        let recording = read(&bytes).unwrap();
        assert!(recording.truncated && recording.vcpus[0].capacity() < 64);
        let mut bytes = HEADER.to_bytes().to_vec();
        bytes.extend(block_header(0, 100_000_000, 0));
        assert!(matches!(read(&bytes), Err(ReadError::Broken { .. })));
    }

    #[test]
    fn the_part_of_a_run_is_chosen_by_when_halts_began() {
        let at = |start_ns| Halt { start_ns, ..a_halt() };
        let recording = read(&file(&[(0, 0, vec![at(1), at(2)]), (1, 0, vec![at(3)])])).unwrap();
        assert_eq!(recording.clone().between(2, 3).iter().map(|h| h.start_ns).sum::<u64>(), 2);
        assert_eq!(recording.between(0, u64::MAX).halts(), 3);
    }

    #[test]
    fn what_waking_costs_is_the_median_of_those_that_tell() {
        let costs = [None, Some(30), Some(10), Some(20), None];
        let halts = costs.map(|wake_cost_ns| Halt { wake_cost_ns, ..a_halt() }).to_vec();
        assert_eq!(read(&file(&[(1, 0, halts)])).unwrap().wake_cost_ns(), Some(20));
        assert_eq!(read(&file(&[])).unwrap().wake_cost_ns(), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            blocks in prop::collection::vec(
                (0..2u32, 0..1000u64, prop::collection::vec(halts(), 0..20)), 0..6)
        ) {
            let recording = read(&file(&blocks)).unwrap();
            prop_assert_eq!(recording.header, HEADER);
            prop_assert_eq!(recording.lost, blocks.iter().map(|block| block.1).sum::<u64>());
            for vcpu in 0..2 {
                let of_vcpu = blocks.iter().filter(|block| block.0 == vcpu);
                let expected: Vec<Halt> = of_vcpu.flat_map(|block| block.2.clone()).collect();
                prop_assert_eq!(&recording.vcpus[vcpu as usize], &expected);
            }
        }

        #[test]
        fn a_file_cut_anywhere_gives_what_was_whole(
            first in prop::collection::vec(halts(), 1..9),
            second in prop::collection::vec(halts(), 1..9),
            cut in 0.0..1.0f64,
        ) {
            let bytes = file(&[(0, 0, first.clone()), (0, 0, second.clone())]);
            let whole = [first, second].concat();
            let length = HEADER_BYTES + ((bytes.len() - HEADER_BYTES) as f64 * cut) as usize;
            let recording = read(&bytes[..length]).unwrap();
            let halts = &recording.vcpus[0];
            prop_assert_eq!(halts, &whole[..halts.len()]);
            let used = HEADER_BYTES + halts.len() * HALT_BYTES;
            prop_assert!(length - used < 2 * BLOCK_BYTES + HALT_BYTES);
        }

        #[test]
        fn random_bytes_are_an_error_or_a_recording_and_never_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            keep in 0..4usize,
        ) {
            // With as much of a good beginning as lets the reader get further.
            let good = file(&[(0, 0, vec![a_halt()])]);
            let keep = [0, 16, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES][keep];
            let _ = read(&[&good[..keep], &bytes].concat());
        }

        #[test]
        fn a_changed_byte_is_an_error_or_another_recording(at in 0..152usize, to: u8) {
            let mut bytes = file(&[(0, 0, vec![a_halt(), a_halt()])]);
            bytes[at] = to;
            let _ = read(&bytes);
        }
    }
}
