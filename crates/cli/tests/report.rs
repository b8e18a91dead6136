//! `report`: one page that needs nothing else.

mod common;

use common::*;

#[test]
fn a_page_holds_everything_and_needs_nothing() {
    let folder = Folder::new();
    let path = folder.file("report.html");
    let args = [
        "report",
        "-o",
        &path,
        "--quick",
        "--backends",
        "cpu",
        "--threads",
        "2",
        "--note",
        "a <note>",
    ];
    assert_eq!(stdout(&args, 0).trim(), path);
    let page = std::fs::read_to_string(&path).unwrap();
    for part in [
        "<!doctype html>",
        "name=\"viewport\"",
        "prefers-color-scheme: dark",
        "a &lt;note&gt;",
        "<h2>Backends</h2>",
        "<h2>Correctness</h2>",
        "<h2>Speed over N</h2>",
        "<h2>Memory over N</h2>",
        "few heads and many",
        "<h2>Bytes between slow and fast memory</h2>",
        "cpu: speed over N",
        "measured ceiling",
        "All on cpu, ",
        "<th>N</th><th>algorithm</th>",
        "<th>heads</th><th>algorithm</th>",
        "<th>sizes</th></tr>",
        "= formula",
        "tilewise bench --shapes",
        "tilewise io --shape",
        "one query (decode)",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // The only address is the name of the SVG language.
    let addresses = page.replace("http://www.w3.org/2000/svg", "");
    for outside in [
        "http:", "https:", "<script", "<link", "url(", "@import", " src=", "#000000",
    ] {
        assert!(!addresses.contains(outside), "{outside}");
    }
    assert!(!page.contains("FAIL"));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(page.matches("<svg").count() >= 4);
    for tag in ["table", "div", "body", "style", "dl"] {
        let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
        assert_eq!(
            page.matches(&close).count(),
            page.matches(&open).count(),
            "{tag}"
        );
    }
}

#[test]
fn a_place_that_cannot_be_written_and_a_backend_that_is_not_here_are_errors() {
    let text = error(&[
        "report",
        "-o",
        "nowhere/report.html",
        "--quick",
        "--backends",
        "cpu",
    ]);
    assert!(text.contains("nowhere/report.html"), "{text}");
    let folder = Folder::new();
    let path = folder.file("report.html");
    let text = error(&["report", "-o", &path, "--quick", "--backends", "cuda:99"]);
    assert!(text.contains("cuda:99"), "{text}");
}
