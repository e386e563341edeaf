//! Are wrong arguments refused, with the right error, before anything has changed? For every operation.

mod attention;
mod pages;
mod predictor;

use super::Cases;
use super::values::natural;
use crate::backend::{Backend, Operation};
use crate::{Error, PageFormat};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let name = "wrong arguments are refused";
    list.add(Operation::Append, format, 10_000, name, move |b| pages::append(b, format));
    list.add(Operation::Append, format, 10_000, "dims that no kernel has are refused", move |b| pages::dims(b, format));
    list.add(Operation::Transfer, format, 10_000, name, move |b| pages::transfer(b, format));
    list.add(Operation::Attend, format, 10_000, name, move |b| attention::attend(b, format));
    list.add(Operation::Project, format, 10_000, name, move |b| predictor::project(b, format));
}

/// The operations on tensors.
pub(super) fn tensor_cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let name = "wrong arguments are refused";
    list.add(Operation::Merge, format, 10_000, name, move |b| attention::merge(b, natural(format)));
    list.add(Operation::Score, format, 10_000, name, move |b| predictor::score(b, natural(format)));
}

fn shape(error: &Error) -> bool {
    matches!(error, Error::Shape { .. })
}

fn outside(error: &Error) -> bool {
    matches!(error, Error::OutOfBounds { .. })
}

fn misaligned(error: &Error) -> bool {
    matches!(error, Error::Misaligned { .. })
}

/// Too large to lie in any buffer, or to be addressed: either is said.
fn beyond(error: &Error) -> bool {
    matches!(error, Error::OutOfBounds { .. } | Error::TooLarge { .. })
}

fn geometry(error: &Error) -> bool {
    matches!(error, Error::Geometry { .. })
}

fn config(error: &Error) -> bool {
    matches!(error, Error::Config { .. })
}

fn unsupported(error: &Error) -> bool {
    matches!(error, Error::Unsupported { .. })
}
