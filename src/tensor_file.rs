//! How do a few tensors get into a safetensors file and back, with a version and the numbers that they must agree with?

use crate::{Error, Result};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

/// What `version` says; another version is refused.
pub(crate) const VERSION: &str = "1";

/// A tensor to be written: name, shape and bytes.
pub(crate) type Written<'a> = (&'a str, Vec<usize>, &'a [u8]);

/// The bytes of a file with tensors of one type, and metadata: `version`, the words and the numbers.
pub(crate) fn encode(
    what: &str,
    dtype: Dtype,
    tensors: &[Written<'_>],
    words: &[(&str, &str)],
    numbers: &[(&str, u32)],
) -> Result<Vec<u8>> {
    let failed = |error: safetensors::SafeTensorError| refused(what, "serialize", &error);
    let numbers = numbers.iter().map(|(key, n)| ((*key).to_owned(), n.to_string()));
    let mut metadata: HashMap<String, String> = numbers.collect();
    metadata.insert("version".into(), VERSION.into());
    metadata.extend(words.iter().map(|(key, word)| ((*key).to_owned(), (*word).to_owned())));
    let views = tensors.iter().map(|(name, shape, bytes)| Ok((*name, TensorView::new(dtype, shape.clone(), bytes)?)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    serialize(views, Some(metadata)).map_err(failed)
}

/// Writes a file.
pub(crate) fn save(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|error| refused(&path.display().to_string(), "write", &error))
}

/// Reads a file: its name for errors, and its bytes.
pub(crate) fn load(path: &Path) -> Result<(String, Vec<u8>)> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|error| refused(&name, "read", &error))?;
    Ok((name, bytes))
}

/// A file of this version that is being read.
pub(crate) struct TensorFile<'a> {
    name: &'a str,
    said: HashMap<String, String>,
    tensors: SafeTensors<'a>,
}

impl<'a> TensorFile<'a> {
    /// [`Error::File`] when it is no safetensors file, [`Error::WrongFile`] for another version.
    pub(crate) fn parse(name: &'a str, bytes: &'a [u8]) -> Result<Self> {
        let failed = |error: safetensors::SafeTensorError| refused(name, "parse", &error);
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(failed)?;
        let said = header.metadata().clone().unwrap_or_default();
        let file = TensorFile { name, said, tensors: SafeTensors::deserialize(bytes).map_err(failed)? };
        file.agree("version", file.said("version"), VERSION)?;
        Ok(file)
    }

    /// What the metadata say under a key.
    pub(crate) fn said(&self, key: &str) -> String {
        self.said.get(key).cloned().unwrap_or_else(|| "missing".into())
    }

    /// A tensor of this type.
    pub(crate) fn tensor(&self, name: &str, dtype: Dtype) -> Result<TensorView<'_>> {
        let tensor = self.tensors.tensor(name).map_err(|error| refused(self.name, "parse", &error))?;
        self.agree("dtype", format!("{:?}", tensor.dtype()), format!("{dtype:?}"))?;
        Ok(tensor)
    }

    /// The axes of a tensor, which must be as many as are asked for.
    pub(crate) fn axes<const N: usize>(&self, tensor: &TensorView<'_>) -> Result<[usize; N]> {
        let shape = tensor.shape();
        shape.try_into().map_err(|_| self.wrong("number of axes", shape.len(), N))
    }

    /// Checks that the metadata say what the tensors are like.
    pub(crate) fn says(&self, numbers: &[(&'static str, usize)]) -> Result<()> {
        numbers.iter().try_for_each(|&(what, of_tensor)| self.agree(what, self.said(what), of_tensor))
    }

    /// [`Error::WrongFile`] unless both read the same.
    pub(crate) fn agree(&self, what: &'static str, found: impl Display, expected: impl Display) -> Result<()> {
        let (found, expected) = (found.to_string(), expected.to_string());
        if found == expected { Ok(()) } else { Err(self.wrong(what, found, expected)) }
    }

    /// The error of a file whose `what` is not as it should be.
    pub(crate) fn wrong(&self, what: &'static str, found: impl Display, expected: impl Display) -> Error {
        Error::WrongFile { path: self.name.to_owned(), what, found: found.to_string(), expected: expected.to_string() }
    }
}

fn refused(path: &str, operation: &'static str, error: &dyn Display) -> Error {
    Error::File { path: path.to_owned(), operation, message: error.to_string() }
}
