//! Which cases the paths on the command line stand for.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

/// One thing to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A case with data.
    Tensors(PathBuf),
    /// A case without data.
    Spec(PathBuf),
    /// Container files.
    Manifest(PathBuf),
}

#[derive(Deserialize)]
struct Index {
    cases: Vec<IndexEntry>,
}

#[derive(Deserialize)]
struct IndexEntry {
    file: PathBuf,
}

/// The cases of all paths, in order.
///
/// # Errors
/// If a path is missing, or stands for nothing that could be checked.
pub(super) fn find(paths: &[PathBuf]) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in paths {
        let before = sources.len();
        if path.is_dir() {
            directory(path, &mut sources)?;
            if sources.len() == before {
                bail!("{}: no cases in this directory", path.display());
            }
        } else {
            file(path, &mut sources)?;
        }
    }
    Ok(sources)
}

/// An output set with its index, or a folder of case files.
fn directory(path: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let index = path.join("index.json");
    let manifest = path.join("manifest.json");
    if index.is_file() {
        listed(&index, sources)?;
    } else if manifest.is_file() {
        sources.push(Source::Manifest(manifest));
        return Ok(());
    } else {
        for folder in [path.to_owned(), path.join("attn"), path.join("spec")] {
            if folder.is_dir() {
                unlisted(&folder, sources)?;
            }
        }
    }
    let manifest = path.join("files/manifest.json");
    if manifest.is_file() {
        sources.push(Source::Manifest(manifest));
    }
    Ok(())
}

fn listed(index: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let name = index.display();
    let text = std::fs::read(index).with_context(|| name.to_string())?;
    let Index { cases } =
        serde_json::from_slice(&text).with_context(|| format!("{name}: bad index"))?;
    let folder = index.parent().unwrap_or(Path::new(""));
    for IndexEntry { file } in cases {
        sources.push(by_extension(&folder.join(file))?);
    }
    Ok(())
}

fn unlisted(folder: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let name = || folder.display().to_string();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(name)? {
        files.push(entry.with_context(name)?.path());
    }
    files.sort();
    for path in files {
        if path.is_file()
            && let Ok(source) = by_extension(&path)
        {
            sources.push(source);
        }
    }
    Ok(())
}

fn by_extension(path: &Path) -> Result<Source> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Ok(Source::Tensors(path.to_owned())),
        Some("json") => Ok(Source::Spec(path.to_owned())),
        _ => bail!("{}: a case is a .safetensors or .json file", path.display()),
    }
}

/// A file by name: an index, a manifest, or one case.
fn file(path: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let source = by_extension(path)?;
    if let Source::Spec(_) = source {
        let name = path.display();
        let text = std::fs::read(path).with_context(|| name.to_string())?;
        let content: Value =
            serde_json::from_slice(&text).with_context(|| format!("{name}: bad JSON"))?;
        if content.get("cases").is_some() {
            return listed(path, sources);
        }
        if content.get("files").is_some() {
            sources.push(Source::Manifest(path.to_owned()));
            return Ok(());
        }
    }
    sources.push(source);
    Ok(())
}
