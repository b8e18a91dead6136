//! Tensor files: the sound and broken ones of the conformance set, and round trips.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use half::bf16;
use proptest::prelude::*;
use serde_json::Value;
use tilewise_cli::container::{Container, Fault, Kind, Tensor, write_npy, write_safetensors};
use tilewise_cli::memory::peak_extra_bytes;

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance/files")
}

/// Peaks are counted for the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|broken| broken.into_inner())
}

/// Opens a file and reads all its tensors.
fn read_all(path: &Path, raw: Option<Kind>) -> Result<Vec<(String, Read)>, (String, &'static str)> {
    let fail = |e: tilewise_cli::container::ContainerError| (e.to_string(), e.fault.class());
    let container = Container::open_as(path, raw).map_err(fail)?;
    container
        .names()
        .iter()
        .map(|name| {
            let tensor = container.tensor(name).map_err(fail)?;
            Ok((
                name.clone(),
                Read {
                    kind: tensor.kind(),
                    shape: tensor.shape().to_vec(),
                    values: tensor.to_f64(),
                    bytes: tensor.bytes().to_vec(),
                },
            ))
        })
        .collect()
}

#[derive(Debug)]
struct Read {
    kind: Kind,
    shape: Vec<usize>,
    values: Vec<f64>,
    bytes: Vec<u8>,
}

fn assert_holds(file: &str, read: &Read, expected: &Value) {
    let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(read.shape, shape, "{file}");
    if let Some(dtype) = expected["dtype"].as_str() {
        assert_eq!(read.kind, dtype.parse().unwrap(), "{file}");
    }
    let mut compared = 0;
    if expected["values"].is_array() {
        let values: Vec<f64> = serde_json::from_value(expected["values"].clone()).unwrap();
        assert_eq!(read.values, values, "{file}");
        compared += 1;
    }
    if let Some(bits) = expected["bits"].as_array() {
        let got: Vec<String> = read
            .bytes
            .chunks_exact(read.kind.size())
            .map(|element| element.iter().rev().map(|b| format!("{b:02x}")).collect())
            .collect();
        assert_eq!(
            got,
            bits.iter().map(|b| b.as_str().unwrap()).collect::<Vec<_>>(),
            "{file}"
        );
        compared += 1;
    }
    assert!(compared > 0, "{file}: nothing to compare");
}

#[test]
fn every_file_of_the_manifest_reads_as_stated_or_fails_for_the_stated_reason() {
    let _alone = alone();
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(files().join("manifest.json")).unwrap()).unwrap();
    let entries = manifest["files"].as_array().unwrap();
    assert!(entries.len() >= 30);
    for entry in entries {
        let file = entry["file"].as_str().unwrap();
        let path = files().join(file);
        let (result, peak) = peak_extra_bytes(|| read_all(&path, None));
        // Nothing here is larger than a few kilobytes, so neither is what reading it takes.
        let limit = entry["max_alloc_bytes"].as_u64().unwrap_or(1 << 20);
        assert!(peak <= limit.min(4 << 20), "{file}: {peak} bytes");
        match entry["expect"].as_str().unwrap() {
            "ok" => {
                let read = result.unwrap_or_else(|(e, _)| panic!("{e}"));
                match entry["members"].as_object() {
                    Some(members) => {
                        // The manifest may leave members out, but {} says that there are none.
                        assert_eq!(read.is_empty(), members.is_empty(), "{file}");
                        for (name, expected) in members {
                            let found = read.iter().find(|(known, _)| known == name);
                            let (_, tensor) = found.unwrap_or_else(|| panic!("{file}: {name}"));
                            assert_holds(file, tensor, expected);
                        }
                    }
                    None => assert_holds(file, &read[0].1, entry),
                }
            }
            "error" | "ok_or_error" => {
                let (message, class) = result.expect_err(file);
                assert_eq!(class, entry["error"].as_str().unwrap(), "{message}");
                assert!(
                    message.contains(file) && !message.contains('\n'),
                    "{message}"
                );
                if entry["expect"] == "ok_or_error" {
                    let read = read_all(&path, Some(Kind::BF16)).unwrap();
                    assert_holds(file, &read[0].1, entry);
                }
            }
            other => panic!("{other}"),
        }
    }
}

fn scratch(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    (dir, path)
}

#[test]
fn safetensors_come_back_as_they_were_written() {
    let (_dir, path) = scratch("x.safetensors");
    let q = [1.5f32, f32::NAN, -0.0, f32::MIN_POSITIVE / 2.0];
    let mask = [1u8, 0, 1];
    let k = [bf16::from_f32(2.5), bf16::from_f32(-1.0)];
    let metadata = BTreeMap::from([("made by".to_owned(), "a \"test\"\n".to_owned())]);
    let tensors = [
        Tensor::new("mask", &[3], &mask),
        Tensor::new("q", &[2, 1, 2], &q),
        Tensor::new("k", &[2, 1], &k),
    ];
    write_safetensors(&path, &tensors, &metadata).unwrap();
    let container = Container::open(&path).unwrap();
    assert_eq!(container.names(), ["k", "mask", "q"]);
    assert_eq!(container.metadata(), metadata);
    let read = container.tensor("q").unwrap();
    assert_eq!(read.shape(), [2, 1, 2]);
    assert_eq!(read.strides(), [2, 2, 1]);
    assert_eq!(
        read.as_slice::<f32>()
            .unwrap()
            .iter()
            .map(|x| x.to_bits())
            .collect::<Vec<_>>(),
        q.map(f32::to_bits)
    );
    assert!(matches!(
        read.as_slice::<f32>().unwrap(),
        std::borrow::Cow::Borrowed(_)
    ));
    assert_eq!(
        &*container.tensor("k").unwrap().as_slice::<bf16>().unwrap(),
        k
    );
    let wrong = read.as_slice::<f64>().unwrap_err();
    assert!(matches!(wrong.fault, Fault::Type { .. }), "{wrong}");
    let missing = container.tensor("v").unwrap_err().to_string();
    assert!(
        missing.contains("x.safetensors: tensor \"v\": no such tensor"),
        "{missing}"
    );
    assert!(container.optional("v").unwrap().is_none());
    let twice = [Tensor::new("q", &[3], &mask), Tensor::new("q", &[3], &mask)];
    assert_eq!(
        write_safetensors(&path, &twice, &metadata)
            .unwrap_err()
            .fault,
        Fault::DuplicateKey
    );
}

/// A file that is written takes another's place: never that of a device, a pipe or a link.
#[cfg(unix)]
#[test]
fn what_is_no_file_is_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let (dir, path) = scratch("x.safetensors");
    let tensor = [Tensor::new("q", &[2], &[1.0f32, 2.0])];
    let socket = dir.path().join("socket.safetensors");
    let _open = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for place in [&socket, dir.path()] {
        let error = write_safetensors(place, &tensor, &BTreeMap::new()).unwrap_err();
        assert_eq!(error.fault.class(), "io", "{error}");
    }
    let kind = std::fs::symlink_metadata(&socket).unwrap().file_type();
    assert!(kind.is_socket(), "{kind:?}");

    let link = dir.path().join("link.safetensors");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    // Twice: the link leads nowhere at first.
    for _ in 0..2 {
        write_safetensors(&link, &tensor, &BTreeMap::new()).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(Container::open(&path).unwrap().names(), ["q"]);
    }
}

#[test]
fn npy_comes_back_as_it_was_written_bfloat16_on_request() {
    let (_dir, path) = scratch("v.npy");
    let data: Vec<f64> = (0..6).map(f64::from).collect();
    write_npy(&path, &Tensor::new("v", &[2, 3], &data)).unwrap();
    let container = Container::open(&path).unwrap();
    assert_eq!(container.names(), ["v"]);
    assert_eq!(
        &*container.tensor("v").unwrap().as_slice::<f64>().unwrap(),
        data
    );

    let half = [bf16::from_f32(1.5), bf16::from_f32(-2.0)];
    write_npy(&path, &Tensor::new("v", &[2], &half)).unwrap();
    let refused = Container::open(&path).unwrap_err().to_string();
    assert!(refused.contains("bf16"), "{refused}");
    let container = Container::open_as(&path, Some(Kind::BF16)).unwrap();
    assert_eq!(
        &*container.tensor("v").unwrap().as_slice::<bf16>().unwrap(),
        half
    );
}

#[test]
fn npz_members_are_read_stored_or_deflated_and_bombs_are_not_unpacked() {
    use std::io::Write;
    let _alone = alone();
    let (dir, path) = scratch("x.npz");
    let data: Vec<f32> = (0..600_000).map(|x| (x % 7) as f32).collect();
    let npy = dir.path().join("q.npy");
    write_npy(&npy, &Tensor::new("q", &[600, 1000], &data)).unwrap();
    let npy = std::fs::read(npy).unwrap();
    let mut zip = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    let deflated = zip::write::SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Deflated);
    let stored = deflated.compression_method(zip::CompressionMethod::Stored);
    for (name, options) in [("stored.npy", stored), ("deflated.npy", deflated)] {
        zip.start_file(name, options).unwrap();
        zip.write_all(&npy).unwrap();
    }
    // A header of six elements, and 256 MiB of zeros that deflate to a quarter of one.
    zip.start_file("bomb.npy", deflated).unwrap();
    zip.write_all(&std::fs::read(files().join("d-fortran.npy")).unwrap())
        .unwrap();
    for _ in 0..256 {
        zip.write_all(&[0; 1 << 20]).unwrap();
    }
    zip.start_file("notes.txt", deflated).unwrap();
    zip.write_all(b"no array").unwrap();
    zip.finish().unwrap();

    let container = Container::open(&path).unwrap();
    assert_eq!(container.names(), ["bomb", "deflated", "stored"]);
    for name in ["deflated", "stored"] {
        let tensor = container.tensor(name).unwrap();
        assert_eq!(tensor.shape(), [600, 1000]);
        assert_eq!(*tensor.as_slice::<f32>().unwrap(), data);
    }
    let (result, peak) = peak_extra_bytes(|| container.tensor("bomb").map(|t| t.len()));
    assert_eq!(result.unwrap_err().fault.class(), "trailing_data");
    assert!(peak < 8 << 20, "{peak}");
}

#[test]
fn an_archive_with_two_tensors_of_one_name_is_refused() {
    use std::io::Write;
    let (_dir, path) = scratch("x.npz");
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let stored =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for name in ["q1.npy", "q2.npy"] {
        zip.start_file(name, stored).unwrap();
        zip.write_all(&std::fs::read(files().join("d-fortran.npy")).unwrap())
            .unwrap();
    }
    zip.set_comment("of one name").unwrap();
    let mut bytes = zip.finish().unwrap().into_inner();
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(Container::open(&path).unwrap().names(), ["q1", "q2"]);
    for at in 0..bytes.len() - 6 {
        if bytes[at..].starts_with(b"q2.npy") {
            bytes[at + 1] = b'1';
        }
    }
    std::fs::write(&path, &bytes).unwrap();
    let error = Container::open(&path).unwrap_err();
    assert_eq!(error.fault.class(), "bad_archive", "{error}");
}

#[test]
fn files_that_are_no_tensors_are_refused_in_one_line() {
    let (dir, path) = scratch("x.bin");
    for (content, class) in [
        (&b""[..], "bad_magic"),
        (b"hello, world", "bad_magic"),
        (b"PK\x03\x04 and no more", "bad_archive"),
        (b"\x93NUMPY\x01", "header_too_small"),
        (b"\x02\0\0\0\0\0\0\0{}", "ok"),
    ] {
        std::fs::write(&path, content).unwrap();
        match Container::open(&path) {
            Ok(container) => assert!(class == "ok" && container.names().is_empty()),
            Err(e) => assert_eq!(e.fault.class(), class, "{e}"),
        }
    }
    assert_eq!(Container::open(dir.path()).unwrap_err().fault.class(), "io");
    let gone = Container::open(dir.path().join("gone.npy")).unwrap_err();
    assert!(gone.to_string().contains("gone.npy"), "{gone}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes a file holds, reading it ends in tensors or in an error of one line, and in
    /// memory of the order of its size.
    #[test]
    fn damaged_files_never_panic(
        which in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let _alone = alone();
        let mut sound: Vec<PathBuf> = std::fs::read_dir(files()).unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e != "json"))
            .collect();
        sound.sort();
        let source = which.get(&sound);
        let mut bytes = std::fs::read(source).unwrap();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let (_dir, path) = scratch(source.file_name().unwrap().to_str().unwrap());
        std::fs::write(&path, &bytes).unwrap();
        let (result, peak) = peak_extra_bytes(|| read_all(&path, None));
        prop_assert!(peak < 4 << 20, "{peak} bytes for a file of {}", bytes.len());
        if let Err((message, _)) = result {
            prop_assert!(!message.contains('\n'), "{message}");
        }
    }
}
