//! Outputs of parts of the keys joined into the output of all.

use tilewise_core::{Part, TensorView, TensorViewMut, merge_outputs, merge_parts};

const EMPTY: f32 = f32::NEG_INFINITY;

fn merge(parts: &[([f32; 2], f32)]) -> ([f32; 2], f32) {
    let parts: Vec<_> = parts
        .iter()
        .map(|(out, lse)| Part {
            out: TensorView::bhsd(out, [1, 1, 1, 2]).unwrap(),
            lse: TensorView::bhsd(std::slice::from_ref(lse), [1, 1, 1, 1]).unwrap(),
        })
        .collect();
    let (mut out, mut lse) = ([f32::NAN; 2], [f32::NAN]);
    merge_parts(
        &parts,
        TensorViewMut::bhsd(&mut out, [1, 1, 1, 2]).unwrap(),
        Some(TensorViewMut::bhs(&mut lse, [1, 1, 1]).unwrap()),
    )
    .unwrap();
    (out, lse[0])
}

#[test]
fn parts_weigh_as_their_denominators() {
    let (out, lse) = merge(&[([1.0, 0.0], 0.0), ([4.0, 3.0], 2f32.ln())]);
    assert_eq!(out, [3.0, 2.0]);
    assert!((lse - 3f32.ln()).abs() < 1e-7);
    // Natural logarithms, however large.
    let (out, lse) = merge(&[
        ([1.0, 0.0], 1000.0),
        ([5.0, 4.0], 1000.0),
        ([9.0, 9.0], -1000.0),
    ]);
    assert_eq!(out, [3.0, 2.0]);
    assert_eq!(lse, (1000.0 + 2f64.ln()) as f32);
}

#[test]
fn empty_parts_are_neutral() {
    assert_eq!(merge(&[]), ([0.0; 2], EMPTY));
    assert_eq!(
        merge(&[([0.0; 2], EMPTY), ([f32::NAN; 2], EMPTY)]),
        ([0.0; 2], EMPTY)
    );
    let part = ([0.1, -7.0], -3.3);
    assert_eq!(merge(&[([f32::NAN; 2], EMPTY), part]), part);
    assert_eq!(merge(&[part, ([0.0; 2], EMPTY)]), part);
}

#[test]
fn a_part_that_is_no_number_spoils_its_row() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (out, lse) = merge(&[([1.0, 2.0], bad), ([1.0, 2.0], 0.0)]);
        assert!(lse.is_nan() && out.iter().all(|x| x.is_nan()));
    }
    let (out, lse) = merge(&[([f32::NAN, 2.0], 0.0), ([1.0, 2.0], 0.0)]);
    assert!(out[0].is_nan() && out[1] == 2.0 && lse == 2f32.ln());
}

/// Views without an element may have any width.
#[test]
fn of_no_rows_nothing_is_made() {
    let (nothing, lse): ([f32; 0], [f32; 0]) = ([], []);
    let shape = [0, 1, 1, usize::MAX];
    let part = Part {
        out: TensorView::bhsd(&nothing, shape).unwrap(),
        lse: TensorView::bhsd(&lse, [0, 1, 1, 1]).unwrap(),
    };
    let mut out = [0f32; 0];
    let out = TensorViewMut::bhsd(&mut out, shape).unwrap();
    merge_outputs(part, part, out, None).unwrap();
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let (a, b, lse) = ([0f32; 4], [0f32; 2], [0f32; 2]);
    let mut out = [0f32; 4];
    let part = |data, shape| Part {
        out: TensorView::bhsd(data, shape).unwrap(),
        lse: TensorView::bhsd(&lse, [1, 1, 2, 1]).unwrap(),
    };
    let error = merge_outputs(
        part(&a[..], [1, 1, 2, 2]),
        part(&b[..], [1, 1, 2, 1]),
        TensorViewMut::bhsd(&mut out, [1, 1, 2, 2]).unwrap(),
        None,
    )
    .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("out of part 1: expected [1, 1, 2, 2]")
    );
}
