//! Where do a decode step's descriptors lie? In device memory that stays where it is while what it says changes.

use super::ops::{Append, range};
use super::params::{MergeRow, Row, Tile};
use super::{Caps, DeviceBuffer};
use crate::{Error, Result};

/// Descriptors in device memory, for launches that are captured once and replayed while sequences grow.
///
/// What the arguments of the call say of them in slices lies here too, word for word, and what each replay finds here counts.
/// A launch is configured for what these descriptors may come to, not for what they say now: the tiles' splits are the most
/// that their rows will see.
#[derive(Debug)]
pub struct StepMemory<'a, Buf> {
    /// Descriptors, and the page tables: a tile's `table` counts words from its start.
    pub buffer: &'a Buf,
    /// Bytes to the first [`Tile`]; there is one for each row, in the order of the rows.
    pub tiles: u64,
    /// Bytes to the first [`Row`]. Its last visible token is the one that the step appends; 0 tokens: it appends none.
    pub rows: u64,
    /// Bytes to the first [`MergeRow`].
    pub merge: u64,
    /// Rows.
    pub count: u32,
    /// The most states that a row may come to, with those of its first section that would come before them.
    pub states: u32,
}

impl<Buf> Clone for StepMemory<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buf> Copy for StepMemory<'_, Buf> {}

impl<Buf: DeviceBuffer> StepMemory<'_, Buf> {
    /// Checks ranges and devices. What lies there is the store's to keep valid.
    pub fn validate(&self, caps: &Caps) -> Result<()> {
        let parts =
            [(self.tiles, size_of::<Tile>()), (self.rows, size_of::<Row>()), (self.merge, size_of::<MergeRow>())];
        for (offset, bytes) in parts {
            range(self.buffer, offset, u64::from(self.count) * bytes as u64, "a step's descriptors", caps)?;
            let (value, maximum) = (offset / 4, u32::MAX.into());
            if value > maximum {
                return Err(Error::TooLarge { what: "the words before a step's descriptors", value, maximum });
            }
        }
        Ok(())
    }

    /// Checks that an append has a token for each row, whatever its runs say at the moment.
    pub fn validate_append(&self, args: &Append<'_, Buf>, caps: &Caps) -> Result<()> {
        let geometry = args.record.geometry();
        let shape = |dim: u32| [self.count.into(), geometry.kv_heads().into(), dim.into()];
        args.k.validate("K", shape(geometry.k_dim()), caps)?;
        args.v.validate("V", shape(geometry.v_dim()), caps)?;
        if args.onto.is_some() {
            let format = "a step whose keys are projected".into();
            return Err(Error::Unsupported { backend: caps.backend, operation: "append", format });
        }
        Ok(())
    }

    /// Checks that a call has as many rows.
    pub fn validate_rows(&self, rows: usize) -> Result<()> {
        match (rows as u64, self.count.into()) {
            (got, expected) if got != expected => Err(Error::Shape { what: "the rows of a step", got, expected }),
            _ => Ok(()),
        }
    }
}
