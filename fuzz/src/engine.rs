//! Runs a target over and over: every input of the corpus, then mutations of them.
//!
//! An input that reaches an edge, or a number of passes over it, that none has reached before joins
//! the corpus. One seed makes one sequence of inputs, as long as the target always does the same
//! with the same input.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::coverage::{self, Seen};

/// The longest input made, in bytes.
pub const MAX_BYTES: usize = 4096;
/// Bytes and words at which something often happens.
const INTERESTING: [u64; 18] =
    [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 64, 127, 128, 255, 0x7fff, 0x8000, 0x7fff_ffff, 0xffff_ffff];

/// A target.
pub type Target = fn(&[u8]);

type Note = Box<dyn FnMut(&[u8])>;

/// Random numbers (SplitMix64), the same for the same seed.
pub struct Random(u64);

impl Random {
    /// A sequence.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Less than `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound.max(1) as u64) as usize
    }
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Executions of the target.
    pub executions: u64,
    /// Inputs in the corpus.
    pub inputs: usize,
    /// Edges taken; 0 without counters.
    pub edges: usize,
    /// How long it took.
    pub elapsed: Duration,
}

/// A target, its corpus, and what that reaches.
pub struct Engine {
    target: Target,
    random: Random,
    corpus: Vec<Vec<u8>>,
    seen: Seen,
    executions: u64,
    /// Called with each input before it runs.
    note: Note,
    /// Where inputs that join the corpus are written.
    directory: Option<PathBuf>,
}

impl Engine {
    /// An engine with an empty corpus.
    pub fn new(target: Target, seed: u64) -> Engine {
        Engine {
            target,
            random: Random::new(seed),
            corpus: Vec::new(),
            seen: Seen::new(),
            executions: 0,
            note: Box::new(|_| {}),
            directory: None,
        }
    }

    /// Has `note` called with each input before it runs, so that it is known when the target ends the
    /// program.
    pub fn note(&mut self, note: impl FnMut(&[u8]) + 'static) {
        self.note = Box::new(note);
    }

    /// Writes inputs that reach something new to `directory`.
    pub fn keep_in(&mut self, directory: &Path) {
        self.directory = Some(directory.into());
    }

    /// Runs an input; how much of what it reached is new.
    fn execute(&mut self, input: &[u8]) -> usize {
        (self.note)(input);
        coverage::clear();
        (self.target)(input);
        self.executions += 1;
        self.seen.add_counters()
    }

    /// Runs an input and takes it into the corpus: always without counters, else if it is new.
    pub fn seed(&mut self, input: Vec<u8>) {
        let new = self.execute(&input);
        if new > 0 || coverage::edges() == 0 {
            self.corpus.push(input);
        }
    }

    /// Runs one mutation.
    ///
    /// # Errors
    /// It is new and cannot be written.
    pub fn step(&mut self) -> io::Result<()> {
        let input = self.mutate();
        if self.execute(&input) == 0 {
            return Ok(());
        }
        if let Some(directory) = &self.directory {
            fs::write(directory.join(name(&input)), &input)?;
        }
        self.corpus.push(input);
        Ok(())
    }

    /// What was done so far.
    pub fn report(&self, since: Instant) -> Report {
        Report {
            executions: self.executions,
            inputs: self.corpus.len(),
            edges: self.seen.edges(),
            elapsed: since.elapsed(),
        }
    }

    fn mutate(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        // The newest ones more often: they are where the unknown begins.
        let from = if random.below(3) == 0 { self.corpus.len().saturating_sub(32) } else { 0 };
        let choice = from + random.below(self.corpus.len() - from);
        let mut input = self.corpus.get(choice).cloned().unwrap_or_default();
        for _ in 0..1 << random.below(5) {
            let other = random.below(self.corpus.len());
            let other = self.corpus.get(other).map_or(&[][..], Vec::as_slice);
            mutate_once(&mut input, other, random);
        }
        input.truncate(MAX_BYTES);
        input
    }
}

/// Changes, adds or removes something.
fn mutate_once(input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(input.len());
    let most = 2 << random.below(6);
    let run = 1 + random.below(most);
    let end = (at + run).min(input.len());
    match random.below(9) {
        _ if input.is_empty() => {
            let count = 1 + random.below(256);
            input.extend((0..count).map(|_| random.bits() as u8));
        }
        0 => input[at] ^= 1 << random.below(8),
        1 => input[at] = random.bits() as u8,
        2 => input[at] = input[at].wrapping_add(random.below(17) as u8).wrapping_sub(8),
        3 => {
            let value = INTERESTING[random.below(INTERESTING.len())];
            let value = if random.below(2) == 0 { value } else { value.wrapping_neg() };
            let width = [1, 2, 4, 8][random.below(4)];
            for (to, from) in input[at..].iter_mut().zip(value.to_le_bytes()).take(width) {
                *to = from;
            }
        }
        4 => {
            input.drain(at..end);
        }
        5 => {
            let copy = input[at..end].to_vec();
            let to = random.below(input.len() + 1);
            input.splice(to..to, copy);
        }
        6 => {
            let bytes: Vec<u8> = (0..run).map(|_| random.bits() as u8).collect();
            input.splice(at..at, bytes);
        }
        7 => {
            let from = random.below(other.len());
            let piece = &other[from..(from + 4 * run).min(other.len())];
            let end = if random.below(2) == 0 { at } else { (at + piece.len()).min(input.len()) };
            input.splice(at..end, piece.iter().copied());
        }
        _ => {
            let bytes = (0..run).map(|_| random.bits() as u8);
            input.extend(bytes);
        }
    }
}

/// A file name for an input, from what is in it.
pub fn name(input: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The inputs in a directory, sorted by name; none if it does not exist.
///
/// # Errors
/// It cannot be read.
pub fn read_corpus(directory: &Path) -> io::Result<Vec<Vec<u8>>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        paths.push(entry?.path());
    }
    paths.sort();
    paths.into_iter().filter(|path| path.is_file()).map(fs::read).collect()
}

/// The fewest inputs, as far as one sees, that reach what all of them reach, at most `most` of them:
/// the ones that bring most come first, the shorter of two.
pub fn choose(target: Target, mut inputs: Vec<Vec<u8>>, most: usize) -> Vec<Vec<u8>> {
    inputs.sort_by_key(Vec::len);
    let mut seen = Seen::new();
    let mut chosen = Vec::new();
    while chosen.len() < most {
        let gain = |input: &Vec<u8>| {
            coverage::clear();
            target(input);
            seen.clone().add_counters()
        };
        let gains: Vec<usize> = inputs.iter().map(gain).collect();
        let Some((best, gain)) = gains.iter().enumerate().rev().max_by_key(|(_, gain)| **gain)
        else {
            break;
        };
        if *gain == 0 {
            break;
        }
        let input = inputs.remove(best);
        coverage::clear();
        target(&input);
        seen.add_counters();
        chosen.push(input);
        let mut gains = gains.into_iter();
        let mut index = 0;
        inputs.retain(|_| {
            if index == best {
                gains.next();
            }
            index += 1;
            gains.next().is_none_or(|gain| gain > 0)
        });
    }
    chosen
}
