//! Which edges of the control flow an input took, and about how often.
//!
//! With `-C passes=sancov-module` and LLVM's option `sanitizer-coverage-inline-8bit-counters`, each
//! edge has a byte that counts up, and each module calls [`__sanitizer_cov_8bit_counters_init`] with
//! the range of these bytes before `main`. That works with a stable compiler.

use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

static START: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Called by the compiler's code, once a module, always with the same range: that of the program.
///
/// # Safety
/// `start` to `stop` are bytes that live as long as the program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let length = (stop as usize).saturating_sub(start as usize);
    START.store(start.cast(), Ordering::Relaxed);
    LENGTH.store(length, Ordering::Relaxed);
}

fn counters() -> &'static [AtomicU8] {
    let (start, length) = (START.load(Ordering::Relaxed), LENGTH.load(Ordering::Relaxed));
    if start.is_null() {
        return &[];
    }
    // SAFETY: the range of the program's counters, as the compiler's code gave it. They are static,
    // and what counts in them is not within the language's sight.
    unsafe { std::slice::from_raw_parts(start, length) }
}

/// The number of edges there are; 0 if the program was built without counters.
pub fn edges() -> usize {
    counters().len()
}

/// Sets all counters to zero.
pub fn clear() {
    for counter in counters() {
        counter.store(0, Ordering::Relaxed);
    }
}

/// What was seen: for each edge, a bit for each class of counts.
#[derive(Clone, Default)]
pub struct Seen(Vec<u8>);

impl Seen {
    /// Nothing.
    pub fn new() -> Seen {
        Seen(vec![0; edges()])
    }

    /// The number of edges that were taken.
    pub fn edges(&self) -> usize {
        self.0.iter().filter(|bits| **bits != 0).count()
    }

    /// Adds what the counters say; how many bits are new.
    pub fn add_counters(&mut self) -> usize {
        let mut new = 0;
        for (bits, counter) in self.0.iter_mut().zip(counters()) {
            let count = counter.load(Ordering::Relaxed);
            if count != 0 {
                new += add(bits, class(count));
            }
        }
        new
    }
}

fn add(bits: &mut u8, more: u8) -> usize {
    let new = more & !*bits;
    *bits |= new;
    new.count_ones() as usize
}

/// Counts are alike if they have the same bit: 1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 to 127, more.
fn class(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..8 => 8,
        8..16 => 16,
        16..32 => 32,
        32..128 => 64,
        128.. => 128,
    }
}
