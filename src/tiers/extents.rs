//! Which slots of a tier are free, and which one a stream of pages gets next: its pages stay adjacent.
//!
//! Slots form aligned blocks. A stream (the pages of one layer of one sequence) fills a block of its own before it
//! takes the next one, so that many streams that grow in turns still read back in long runs.

/// The free slots of a tier.
#[derive(Debug, Clone)]
pub(crate) struct Extents {
    slots: u32,
    block: u32,
    free: u32,
    free_slots: Bits,
    free_blocks: Bits,
    /// Taken slots of each block.
    taken: Vec<u32>,
}

/// Slots that a stream fills before it takes others: as many as travel together at full speed, fewer in a small tier, so
/// that there are blocks for many streams.
pub(crate) fn extent(slots: u32) -> u32 {
    (slots / 256).next_power_of_two().clamp(16, 256)
}

impl Extents {
    /// `slots` free slots in aligned blocks of `block` (at least 1; the last block may be shorter).
    pub(crate) fn new(slots: u32, block: u32) -> Self {
        let block = block.max(1);
        let blocks = slots.div_ceil(block);
        Extents {
            slots,
            block,
            free: slots,
            free_slots: Bits::ones(slots),
            free_blocks: Bits::ones(blocks),
            taken: vec![0; blocks as usize],
        }
    }

    /// All slots.
    pub(crate) fn capacity(&self) -> u32 {
        self.slots
    }

    /// Slots that nobody has taken.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Slots that are taken.
    pub(crate) fn used(&self) -> u32 {
        self.slots - self.free
    }

    /// Whether `slot` is one of the tier's and taken.
    pub(crate) fn is_taken(&self, slot: u32) -> bool {
        slot < self.slots && !self.free_slots.has(slot)
    }

    /// Takes a slot for the page after the one in `after`: the next slot of the same block, else the first slot of a
    /// block of its own (the next block before the lowest one), else the lowest free slot; `None` when all are taken.
    pub(crate) fn take(&mut self, after: Option<u32>) -> Option<u32> {
        let slot = self.adjacent(after).or_else(|| self.own_block(after)).or_else(|| self.free_slots.first())?;
        self.claim(slot).then_some(slot)
    }

    /// Takes this very slot; `false` when it is taken or does not exist.
    pub(crate) fn claim(&mut self, slot: u32) -> bool {
        if slot >= self.slots || !self.free_slots.has(slot) {
            return false;
        }
        self.free_slots.clear(slot);
        self.free_blocks.clear(slot / self.block);
        self.taken[(slot / self.block) as usize] += 1;
        self.free -= 1;
        true
    }

    /// Gives a slot back; `false` (and nothing changes) when it is free already or does not exist.
    pub(crate) fn give(&mut self, slot: u32) -> bool {
        if !self.is_taken(slot) {
            return false;
        }
        let block = slot / self.block;
        self.free_slots.set(slot);
        self.taken[block as usize] -= 1;
        if self.taken[block as usize] == 0 {
            self.free_blocks.set(block);
        }
        self.free += 1;
        true
    }

    fn adjacent(&self, after: Option<u32>) -> Option<u32> {
        let next = after?.checked_add(1)?;
        (next < self.slots && !next.is_multiple_of(self.block) && self.free_slots.has(next)).then_some(next)
    }

    fn own_block(&self, after: Option<u32>) -> Option<u32> {
        let next = after.map(|slot| slot / self.block + 1).filter(|&block| (block as usize) < self.taken.len());
        let block = next.filter(|&block| self.free_blocks.has(block)).or_else(|| self.free_blocks.first())?;
        Some(block * self.block)
    }

    /// Whether counts, slots and blocks agree.
    #[cfg(test)]
    pub(crate) fn is_consistent(&self) -> bool {
        let mut taken = vec![0; self.taken.len()];
        (0..self.slots).filter(|&slot| self.is_taken(slot)).for_each(|slot| taken[(slot / self.block) as usize] += 1);
        let blocks = taken.iter().enumerate().all(|(block, &taken)| self.free_blocks.has(block as u32) == (taken == 0));
        blocks && taken == self.taken && taken.iter().sum::<u32>() == self.used()
    }
}

/// A set of numbers below a bound whose lowest member is found in a few steps: each level has a bit for each word of
/// the level below that is not zero.
#[derive(Debug, Clone)]
struct Bits {
    levels: Vec<Vec<u64>>,
}

impl Bits {
    /// All numbers below `count`.
    fn ones(count: u32) -> Self {
        let mut levels = Vec::new();
        let mut bits = count as usize;
        loop {
            let mut words = vec![u64::MAX; bits / 64];
            if !bits.is_multiple_of(64) {
                words.push((1 << (bits % 64)) - 1);
            }
            bits = words.len();
            levels.push(words);
            if bits <= 1 {
                return Bits { levels };
            }
        }
    }

    fn has(&self, number: u32) -> bool {
        self.levels[0][number as usize / 64] >> (number % 64) & 1 == 1
    }

    fn set(&mut self, number: u32) {
        let mut at = number as usize;
        for words in &mut self.levels {
            words[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    fn clear(&mut self, number: u32) {
        let mut at = number as usize;
        for words in &mut self.levels {
            words[at / 64] &= !(1 << (at % 64));
            if words[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The lowest member.
    fn first(&self) -> Option<u32> {
        let mut at = 0;
        for words in self.levels.iter().rev() {
            let word = words.get(at).copied().filter(|&word| word != 0)?;
            at = at * 64 + word.trailing_zeros() as usize;
        }
        Some(at as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// What `take` promises, by search over a plain set of free slots.
    fn naive(free: &BTreeSet<u32>, slots: u32, block: u32, after: Option<u32>) -> Option<u32> {
        let whole = |b: u32| {
            let range = b * block..((b + 1) * block).min(slots);
            !range.is_empty() && range.clone().all(|slot| free.contains(&slot))
        };
        let adjacent = after.map(|a| a + 1).filter(|n| n % block != 0 && free.contains(n));
        let next = after.map(|a| a / block + 1).filter(|&b| whole(b)).map(|b| b * block);
        let lowest = || (0..slots.div_ceil(block)).find(|&b| whole(b)).map(|b| b * block);
        adjacent.or(next).or_else(lowest).or_else(|| free.first().copied())
    }

    #[test]
    fn random_calls_agree_with_a_plain_set() {
        let mut state = 1u64;
        let mut random = move |below: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % u64::from(below)) as u32
        };
        for (slots, block) in [(1, 1), (7, 3), (64, 8), (65, 64), (129, 1), (4160, 16), (5000, 7), (33, 100)] {
            let mut extents = Extents::new(slots, block);
            let mut free: BTreeSet<u32> = (0..slots).collect();
            for _ in 0..3000 {
                let slot = random(slots + 2);
                match random(8) {
                    0..4 => {
                        let after = (random(4) > 0 && slot < slots).then_some(slot);
                        let expected = naive(&free, slots, block, after);
                        assert_eq!(extents.take(after), expected, "slots {slots}, block {block}, after {after:?}");
                        expected.map(|slot| free.remove(&slot));
                    }
                    4..7 => assert_eq!(extents.give(slot), slot < slots && free.insert(slot)),
                    _ => assert_eq!(extents.claim(slot), free.remove(&slot)),
                }
                assert_eq!(extents.is_taken(slot), slot < slots && !free.contains(&slot));
                assert_eq!(extents.free() as usize, free.len());
                assert_eq!(extents.used() + extents.free(), extents.capacity());
            }
            assert!(extents.is_consistent());
        }
    }

    #[test]
    fn streams_that_grow_in_turns_fill_blocks_of_their_own() {
        let mut extents = Extents::new(64, 8);
        let mut streams = [const { Vec::<u32>::new() }; 4];
        for _ in 0..16 {
            for stream in &mut streams {
                stream.push(extents.take(stream.last().copied()).unwrap());
            }
        }
        for stream in &streams {
            assert_eq!(stream.windows(2).filter(|pair| pair[1] != pair[0] + 1).count(), 1, "{stream:?}");
        }
        assert_eq!((extents.free(), extents.take(Some(3))), (0, None));
    }

    #[test]
    fn a_slot_given_twice_is_refused_and_no_slots_are_none() {
        let mut extents = Extents::new(3, 2);
        let slot = extents.take(None).unwrap();
        assert_eq!((extents.give(slot), extents.give(slot), extents.give(99), extents.free()), (true, false, false, 3));
        assert_eq!(Extents::new(0, 8).take(None), None);
        assert_eq!(Extents::new(8, 8).take(Some(u32::MAX)), Some(0));
    }
}
