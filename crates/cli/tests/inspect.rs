//! `inspect`: the kernels keep S and P where their algorithm says.

#![cfg(feature = "cuda")]

mod common;

use std::io::Write;

use common::*;
use serde_json::Value;
use tilewise::cuda::nvrtc::Nvrtc;

fn fixture(name: &str) -> String {
    format!("crates/cli/tests/fixtures/inspect/{name}.ptx")
}

/// `way tensor place` of every access of the kernels.
fn accesses(group: &Value) -> Vec<String> {
    let kernels = group["kernels"].as_array().unwrap().iter();
    let each = |kernel: &Value| -> Vec<String> {
        let accesses = kernel["ptx"]["accesses"].as_array().unwrap().iter();
        accesses
            .map(|a| {
                let text = |name: &str| a[name].as_str().unwrap().to_string();
                format!("{} {} {}", text("way"), text("tensor"), text("place"))
            })
            .collect()
    };
    kernels.flat_map(each).collect()
}

#[test]
fn fixtures_are_attributed_to_tensor_and_place() {
    let report = json(
        &[
            "inspect",
            &fixture("standard"),
            &fixture("fa1"),
            &fixture("fa2"),
        ],
        0,
    );
    let groups = report["algorithms"].as_array().unwrap();
    let [standard, fa1, fa2] = &groups[..] else {
        panic!()
    };
    assert_eq!(
        accesses(standard),
        [
            "load k no loop over keys",
            "load q no loop over keys",
            "store S no loop over keys",
            "load S no loop over keys",
            "store P no loop over keys",
            "store lse no loop over keys",
            "load P inside",
            "load v inside",
            "store out after",
        ]
    );
    for wanted in [
        "load O inside",
        "store O inside",
        "store l inside",
        "store m inside",
        "store O before",
        "store out after",
        "store lse after",
        "load q inside",
        "load v inside",
    ] {
        assert!(
            accesses(fa1).iter().any(|access| access == wanted),
            "{wanted} {:?}",
            accesses(fa1)
        );
    }
    let stores: Vec<String> = accesses(fa2)
        .into_iter()
        .filter(|a| a.starts_with("store"))
        .collect();
    assert_eq!(stores, ["store lse after", "store out after"]);
    for group in groups {
        assert_eq!(group["holds"], true, "{group:#}");
        assert!(!group["findings"].as_array().unwrap().is_empty());
    }
}

#[test]
fn a_kernel_that_stores_p_inside_its_loop_fails() {
    let report = json(&["inspect", &fixture("fa2_stores_p")], 1);
    let group = &report["algorithms"][0];
    assert_eq!(group["holds"], false);
    let failed: Vec<&Value> = group["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["holds"] == false)
        .collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0]["found"], "P");
    let text = stdout(&["inspect", &fixture("fa2_stores_p")], 1);
    assert!(text.contains("FAILS"), "{text}");
}

#[test]
fn the_text_of_a_file() {
    insta::assert_snapshot!(stdout(&["inspect", &fixture("fa1")], 0));
}

/// FA1's statements, put to FA2's kernel, do not hold, and the other way round: they tell the two apart.
#[test]
fn statements_tell_algorithms_apart() {
    let folder = Folder::new();
    for (from, to, name) in [("fa2", "tw_fa1", "a"), ("fa1", "tw_fa2", "b")] {
        let text = std::fs::read_to_string(root().join(fixture(from))).unwrap();
        let path = folder.file(name);
        std::fs::write(&path, text.replace(&format!("tw_{from}"), to)).unwrap();
        let report = json(&["inspect", &path], 1);
        assert_eq!(report["algorithms"][0]["holds"], false);
    }
}

#[test]
fn what_is_no_kernel_is_refused() {
    let folder = Folder::new();
    let path = folder.file("x.ptx");
    for (content, says) in [
        (&b"int main() {}"[..], "no PTX"),
        (b".version 8.0\n.target sm_80\n", "no kernel"),
        (b"\xff\xfe", "neither PTX nor a cubin"),
    ] {
        std::fs::write(&path, content).unwrap();
        let text = error(&["inspect", &path]);
        assert!(text.contains(says), "{text}");
    }
    assert!(error(&["inspect", "nowhere.ptx"]).contains("nowhere.ptx"));
    if cfg!(target_os = "linux") {
        let endless = error(&["inspect", "/dev/zero"]);
        assert!(endless.contains("/dev/zero: expected PTX"), "{endless}");
    }
    let output = tilewise()
        .args(["inspect"])
        .env("TILEWISE_NVRTC", folder.file(""))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("no NVRTC") && text.contains("pip install"),
        "{text}"
    );
}

/// The kernels themselves, for every kind of mask and element type. Needs NVRTC; no GPU.
#[test]
fn s_and_p_never_leave_the_chip() {
    if let Err(reason) = Nvrtc::find(None) {
        assert!(std::env::var_os("TILEWISE_NVRTC").is_none(), "{reason}");
        // Not through eprintln, which the test harness keeps to itself.
        writeln!(
            std::io::stderr(),
            "s_and_p_never_leave_the_chip skipped: {reason}"
        )
        .unwrap();
        return;
    }
    for (dtype, head_dim, mask, arch) in [
        ("bf16", "64", "causal", "sm_80"),
        ("bf16", "128", "full", "sm_90a"),
        ("f16", "128", "band", "sm_90a"),
        ("f32", "64", "causal", "sm_80"),
    ] {
        let args = [
            "inspect",
            "--dtype",
            dtype,
            "--head-dim",
            head_dim,
            "--mask",
            mask,
            "--arch",
            arch,
        ];
        let report = json(&args, 0);
        let groups = report["algorithms"].as_array().unwrap();
        assert_eq!(groups.len(), 3);
        for group in groups {
            assert_eq!(
                group["holds"], true,
                "{dtype} {head_dim} {mask} {arch} {group:#}"
            );
            for kernel in group["kernels"].as_array().unwrap() {
                assert!(
                    kernel["resources"]["registers"].as_u64().unwrap() > 0,
                    "{kernel:#}"
                );
                assert!(
                    kernel["occupancy"]["blocks"].as_u64().unwrap() > 0,
                    "{kernel:#}"
                );
                for access in kernel["ptx"]["accesses"].as_array().unwrap() {
                    assert_ne!(access["tensor"], "unknown", "{kernel:#}");
                }
                if report["disassembler"].is_string() {
                    let sass = &kernel["sass"];
                    let products = kernel["ptx"]["matrix"].as_u64().unwrap();
                    assert!(sass["instructions"].as_u64().unwrap() > 50, "{kernel:#}");
                    assert_eq!(
                        sass["matrix"].as_u64().unwrap() > 0,
                        products > 0,
                        "{kernel:#}"
                    );
                }
            }
        }
        // FA1 stores O, l and m inside the loop; FA2 stores nothing there.
        let inside = |group: &Value| -> Vec<String> {
            let all = accesses(group).into_iter();
            all.filter(|a| a.starts_with("store") && a.ends_with(" inside"))
                .collect()
        };
        assert_eq!(
            inside(&groups[1]),
            ["store O inside", "store l inside", "store m inside"]
        );
        assert_eq!(inside(&groups[2]), [""; 0]);
    }
}

/// The backward kernel adds to dQ inside its loop and stores dk and dv after it: what goes to memory is
/// not N² numbers.
#[test]
fn the_backward_kernel_stores_no_matrix() {
    if Nvrtc::find(None).is_err() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: no NVRTC");
        return;
    }
    let report = json(&["inspect", "--backward", "--algorithms", "fa2"], 0);
    let group = &report["algorithms"][0];
    assert_eq!(
        (&group["holds"], &group["name"]),
        (&true.into(), &"fa2 backward".into())
    );
    let stores: Vec<String> = accesses(group)
        .into_iter()
        .filter(|access| access.starts_with("store"))
        .collect();
    for wanted in ["store dQ inside", "store dk after", "store dv after"] {
        assert!(stores.iter().any(|access| access == wanted), "{stores:?}");
    }
    for matrix in ["S", "P"] {
        let starts = format!("store {matrix} ");
        assert!(!stores.iter().any(|access| access.starts_with(&starts)));
    }
}
