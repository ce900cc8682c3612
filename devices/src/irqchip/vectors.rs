//! Sets of the 256 interrupt vectors: the 256-bit registers of a local APIC (Intel SDM vol. 3,
//! 11.8.4).

use std::sync::atomic::{AtomicU64, Ordering};

/// How many vectors a word holds.
const WORD_BITS: u8 = 64;

fn bit(vector: u8) -> u64 {
    1 << (vector % WORD_BITS)
}

/// The highest vector in words that come lowest first.
fn highest(words: [u64; 4]) -> Option<u8> {
    let [a, b, c, d] = words;
    [(d, 3), (c, 2), (b, 1), (a, 0)].into_iter().find_map(|(word, index)| {
        let top = word.checked_ilog2()? as u8;
        Some(index * WORD_BITS + top)
    })
}

/// The 32-bit register `index` (0 to 7) of the eight that hold the set.
fn register(words: [u64; 4], index: u8) -> u32 {
    let word = words.get(usize::from(index / 2)).copied().unwrap_or(0);
    (word >> (u32::from(index % 2) * 32)) as u32
}

/// A set that one thread owns.
#[derive(Debug, Default)]
pub(super) struct VectorSet([u64; 4]);

impl VectorSet {
    fn word(&mut self, vector: u8) -> &mut u64 {
        let [a, b, c, d] = &mut self.0;
        match vector / WORD_BITS {
            0 => a,
            1 => b,
            2 => c,
            _ => d,
        }
    }

    /// Adds `vector`.
    pub fn insert(&mut self, vector: u8) {
        *self.word(vector) |= bit(vector);
    }

    /// Removes `vector`.
    pub fn remove(&mut self, vector: u8) {
        *self.word(vector) &= !bit(vector);
    }

    /// The highest vector.
    pub fn highest(&self) -> Option<u8> {
        highest(self.0)
    }

    /// The 32-bit register `index` (0 to 7).
    pub fn register(&self, index: u8) -> u32 {
        register(self.0, index)
    }
}

/// A set that any thread may change. Every access is sequentially consistent: see
/// [`Notify`](super::Notify) for the order that is relied upon.
#[derive(Debug, Default)]
pub(super) struct AtomicVectorSet([AtomicU64; 4]);

impl AtomicVectorSet {
    fn word(&self, vector: u8) -> &AtomicU64 {
        let [a, b, c, d] = &self.0;
        match vector / WORD_BITS {
            0 => a,
            1 => b,
            2 => c,
            _ => d,
        }
    }

    fn load(&self) -> [u64; 4] {
        self.0.each_ref().map(|word| word.load(Ordering::SeqCst))
    }

    /// Adds `vector`; true if it was not there.
    pub fn insert(&self, vector: u8) -> bool {
        self.word(vector).fetch_or(bit(vector), Ordering::SeqCst) & bit(vector) == 0
    }

    /// Removes `vector`; true if it was there.
    pub fn remove(&self, vector: u8) -> bool {
        self.word(vector).fetch_and(!bit(vector), Ordering::SeqCst) & bit(vector) != 0
    }

    /// Whether `vector` is there.
    pub fn contains(&self, vector: u8) -> bool {
        self.word(vector).load(Ordering::SeqCst) & bit(vector) != 0
    }

    /// Adds or removes `vector`. Does not write if nothing changes.
    pub fn assign(&self, vector: u8, member: bool) {
        if self.contains(vector) == member {
            return;
        }
        if member {
            self.insert(vector);
        } else {
            self.remove(vector);
        }
    }

    /// The highest vector.
    pub fn highest(&self) -> Option<u8> {
        highest(self.load())
    }

    /// The 32-bit register `index` (0 to 7).
    pub fn register(&self, index: u8) -> u32 {
        register(self.load(), index)
    }

    /// Removes every vector.
    pub fn clear(&self) {
        for word in &self.0 {
            word.store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_empty_set_has_no_highest_vector() {
        assert_eq!(VectorSet::default().highest(), None);
        assert_eq!(AtomicVectorSet::default().highest(), None);
    }

    #[test]
    fn insert_and_remove_tell_whether_something_changed() {
        let set = AtomicVectorSet::default();
        assert!(set.insert(200) && !set.insert(200));
        assert!(set.remove(200) && !set.remove(200));
    }

    proptest! {
        #[test]
        fn both_sets_behave_like_a_set(steps in prop::collection::vec((any::<u8>(), any::<bool>()), 0..300)) {
            let (mut owned, shared, mut model) =
                (VectorSet::default(), AtomicVectorSet::default(), BTreeSet::new());
            for (vector, insert) in steps {
                if insert {
                    owned.insert(vector);
                    prop_assert_eq!(shared.insert(vector), model.insert(vector));
                } else {
                    owned.remove(vector);
                    prop_assert_eq!(shared.remove(vector), model.remove(&vector));
                }
                prop_assert_eq!(owned.highest(), model.last().copied());
                prop_assert_eq!(shared.highest(), model.last().copied());
            }
            for vector in 0..=255 {
                let bit = |register: u32| register >> (vector % 32) & 1 != 0;
                prop_assert_eq!(bit(owned.register(vector / 32)), model.contains(&vector));
                prop_assert_eq!(bit(shared.register(vector / 32)), model.contains(&vector));
                prop_assert_eq!(shared.contains(vector), model.contains(&vector));
            }
            shared.clear();
            prop_assert_eq!(shared.highest(), None);
        }
    }
}
