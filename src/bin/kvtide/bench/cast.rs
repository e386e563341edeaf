//! How is a shape written on the command line?

use anyhow::Context;
use kvtide::{Geometry, PageFormat};
use std::str::FromStr;

/// Sequences of equal length and the heads over them, written `16x8192:32/8/128/16`: sequences × tokens, query heads, KV heads,
/// elements of a head, tokens a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cast {
    pub(super) sequences: u32,
    pub(super) tokens: u32,
    pub(super) heads: [u32; 4],
}

impl FromStr for Cast {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let form = || format!("`{text}` is not of the form 16x8192:32/8/128/16");
        let (what, heads) = text.split_once(':').with_context(form)?;
        let (sequences, tokens) = what.split_once('x').with_context(form)?;
        let heads: Vec<u32> = heads.split('/').map(str::parse).collect::<Result<_, _>>().with_context(form)?;
        let heads = <[u32; 4]>::try_from(heads).ok().with_context(form)?;
        Ok(Cast { sequences: sequences.parse()?, tokens: tokens.parse()?, heads })
    }
}

impl std::fmt::Display for Cast {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [q, kv, dim, page] = self.heads;
        write!(f, "{}x{}:{q}/{kv}/{dim}/{page}", self.sequences, self.tokens)
    }
}

impl Cast {
    pub(super) fn geometry(&self, layers: u32, format: PageFormat) -> kvtide::Result<Geometry> {
        let [q, kv, dim, page] = self.heads;
        Geometry::new(layers, q, kv, dim).page_size(page).format(format).validate()
    }
}

#[cfg(test)]
#[test]
fn shapes_are_read_and_written_alike() {
    let text = "16x8192:32/8/128/16";
    let cast: Cast = text.parse().unwrap();
    assert_eq!((cast.sequences, cast.tokens, cast.to_string()), (16, 8192, text.to_owned()));
    for wrong in ["", "16x8192", "16:32/8/128/16", "1x2:3/4/5", "1x2:3/4/5/6/7", "ax2:3/4/5/6"] {
        assert!(wrong.parse::<Cast>().is_err(), "{wrong}");
    }
}
