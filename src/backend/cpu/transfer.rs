//! `transfer`: copies, gathers and scatters whole records.

use super::memory::{CpuBuffer, copy_words, frame};
use crate::backend::ops::{Place, Transfer};
use crate::record::Record;

pub(super) fn transfer(args: &Transfer<'_, CpuBuffer>) {
    for one in args.moves {
        let (src, from) = at(&args.from, one.from, &args.record);
        let (dst, to) = at(&args.to, one.to, &args.record);
        copy_words((src, from / 4), (dst, to / 4), args.record.bytes() / 4);
    }
}

/// Buffer and byte offset of a record.
fn at<'a>(place: &Place<'a, CpuBuffer>, index: u32, record: &Record) -> (&'a CpuBuffer, u64) {
    match *place {
        Place::Frames(arena) => frame(&arena, index, record),
        Place::Records { buffer, offset, stride } => (buffer, offset + u64::from(index) * stride),
    }
}
