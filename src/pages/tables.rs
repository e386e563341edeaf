//! Where page tables lie in the one device buffer that holds them all: spans of words, recycled by size.

/// Entries of the smallest span.
const SMALLEST: u32 = 16;

/// A page table's place: `capacity` words from word `base` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) base: u32,
    pub(crate) capacity: u32,
}

/// The words of the tables buffer.
#[derive(Debug, Default)]
pub(crate) struct TableSpace {
    /// Words handed out so far, free spans included.
    end: u32,
    /// Free spans by the power of two of their capacity.
    free: [Vec<u32>; 32],
}

impl TableSpace {
    /// Words that the buffer must hold.
    pub(crate) fn words(&self) -> u32 {
        self.end
    }

    /// A span for at least `entries` entries; `None`, and nothing changed, past `maximum` words in all.
    pub(crate) fn take(&mut self, entries: u32, maximum: u32) -> Option<Span> {
        let capacity = entries.max(SMALLEST).checked_next_power_of_two()?;
        let base = match self.free[capacity.ilog2() as usize].pop() {
            Some(base) => base,
            None => {
                let base = self.end;
                self.end = self.end.checked_add(capacity).filter(|end| *end <= maximum)?;
                base
            }
        };
        Some(Span { base, capacity })
    }

    /// Gives a span back.
    pub(crate) fn give(&mut self, span: Span) {
        self.free[span.capacity.ilog2() as usize].push(span.base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_never_overlap_and_are_recycled() {
        let mut space = TableSpace::default();
        let spans: Vec<Span> = [1, 16, 17, 100].iter().map(|&n| space.take(n, 200).unwrap()).collect();
        for (a, b) in spans.iter().zip(&spans[1..]) {
            assert_eq!(a.base + a.capacity, b.base);
        }
        assert_eq!(space.words(), 16 + 16 + 32 + 128);
        space.give(spans[2]);
        assert_eq!(space.take(20, 200), Some(spans[2]));
        assert_eq!(space.take(20, 200), None);
        assert_eq!(space.words(), 192);
    }
}
