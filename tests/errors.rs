//! Input that does not fit is refused with the tensor's name; it never panics and never computes.

use proptest::prelude::*;
use tilewise::{
    Algorithm, BlockTable, DType, Dims, Engine, Error, ErrorClass, HostState, Inputs, Options,
    Problem, TensorView, TensorViewMut,
};

const B: usize = 2;
const HQ: usize = 4;
const HK: usize = 2;
const SQ: usize = 3;
const SK: usize = 5;
const D: usize = 8;

static ZEROS: [f32; 4096] = [0.0; 4096];
static VISIBLE: [u8; 4096] = [1; 4096];

fn view(shape: [usize; 4]) -> TensorView<'static, f32> {
    TensorView::bhsd(&ZEROS, shape).unwrap()
}

fn good() -> Inputs<'static, f32> {
    Inputs::new(
        view([B, HQ, SQ, D]),
        view([B, HK, SK, D]),
        view([B, HK, SK, D]),
    )
}

fn packed_good() -> Inputs<'static, f32> {
    Inputs::new(
        view([1, HQ, SQ, D]),
        view([1, HK, SK, D]),
        view([1, HK, SK, D]),
    )
}

/// Runs on the CPU and expects a refusal of `class` that mentions `name`.
#[track_caller]
fn refused(inputs: Inputs<'_, f32>, options: Options, class: ErrorClass, name: &str) {
    for algorithm in Algorithm::ALL {
        let error = Engine::named("cpu")
            .unwrap()
            .forward_with(algorithm, &inputs, &options)
            .expect_err("accepted");
        assert_eq!(error.class(), class, "{error}");
        assert!(
            error.to_string().contains(name),
            "{error} does not name {name}"
        );
    }
}

#[test]
fn shapes_that_do_not_fit() {
    let shape = ErrorClass::Shape;
    let with = |change: fn(&mut Inputs<'static, f32>)| {
        let mut inputs = good();
        change(&mut inputs);
        inputs
    };
    refused(
        with(|i| i.k = view([B, HK, SK, D + 1])),
        Options::new(),
        shape,
        "k: ",
    );
    refused(
        with(|i| i.k = view([1, HK, SK, D])),
        Options::new(),
        shape,
        "v: ",
    );
    refused(
        with(|i| i.v = view([B, HK, SK + 1, D])),
        Options::new(),
        shape,
        "v: ",
    );
    refused(
        with(|i| i.v = view([B, HK + 1, SK, D])),
        Options::new(),
        shape,
        "v: ",
    );
    refused(
        with(|i| (i.k, i.v) = (view([1, HK, SK, D]), view([1, HK, SK, D]))),
        Options::new(),
        shape,
        "k: ",
    );
    refused(
        with(|i| i.bias = Some(view([B, HQ, SQ, SK + 1]))),
        Options::new(),
        shape,
        "bias: ",
    );
    refused(
        with(|i| i.bias = Some(view([B, HK, SQ, SK]))),
        Options::new(),
        shape,
        "bias: ",
    );
    let mask = TensorView::bhsd(&VISIBLE, [1, 1, SQ, SK + 2]).unwrap();
    refused(good().mask(mask), Options::new(), shape, "mask: ");
    let nothing = Inputs::new(
        view([B, HQ, SQ, 0]),
        view([B, HK, SK, 0]),
        view([B, HK, SK, D]),
    );
    refused(nothing, Options::new(), shape, "head_dim");
}

#[test]
fn heads_that_do_not_divide() {
    let inputs = Inputs::new(
        view([1, 5, SQ, D]),
        view([1, 2, SK, D]),
        view([1, 2, SK, D]),
    );
    refused(inputs, Options::new(), ErrorClass::Heads, "num_heads");
    let inputs = Inputs::new(
        view([1, 5, SQ, D]),
        view([1, 0, SK, D]),
        view([1, 0, SK, D]),
    );
    refused(inputs, Options::new(), ErrorClass::Heads, "num_heads");
}

#[test]
fn options_outside_their_domain() {
    let option = ErrorClass::Option;
    for scale in [f64::NAN, f64::INFINITY] {
        refused(
            good(),
            Options::new().softmax_scale(scale),
            option,
            "softmax_scale",
        );
    }
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(good(), Options::new().softcap(cap), option, "softcap");
    }
    let slopes = vec![0.5; HQ - 1];
    refused(
        good(),
        Options::new().alibi_slopes(slopes),
        ErrorClass::Shape,
        "alibi_slopes",
    );
    refused(
        good(),
        Options::new().alibi_slopes(vec![f32::NAN; HQ]),
        option,
        "alibi_slopes",
    );
    refused(
        good(),
        Options::new().sinks(vec![0.0; HQ + 1]),
        ErrorClass::Shape,
        "sinks",
    );
    refused(
        good(),
        Options::new().sinks(vec![f32::NAN; HQ]),
        option,
        "sinks",
    );
}

#[test]
fn options_that_the_type_of_scores_cannot_hold() {
    for scale in [1e39, -1e300] {
        refused(
            good(),
            Options::new().softmax_scale(scale),
            ErrorClass::Option,
            "softmax_scale",
        );
    }
    for cap in [1e39, 1e-50] {
        refused(
            good(),
            Options::new().softcap(cap),
            ErrorClass::Option,
            "softcap",
        );
    }
}

/// Strides of 0 describe tensors larger than any memory: refused before sizes are multiplied.
#[test]
fn sizes_that_cannot_be_multiplied() {
    let wide = |shape| TensorView::from_strides(&ZEROS, shape, [0; 4], 0);
    assert!(wide([1 << 40, 1 << 40, 1, 1]).is_err());
    let huge = |b, h, s, d| wide([b, h, s, d]).unwrap();
    refused(
        Inputs::new(
            huge(1, 1, 1, 1 << 26),
            huge(1, 1, 1 << 36, 1 << 26),
            huge(1, 1, 1 << 36, 1 << 26),
        ),
        Options::new(),
        ErrorClass::Shape,
        "k: ",
    );
    let dims = |batch, heads, seqlen_q, head_dim_v| Dims {
        batch,
        num_heads: heads,
        num_kv_heads: heads,
        seqlen_q,
        seqlen_k: 1,
        head_dim: 8,
        head_dim_v,
    };
    for dims in [dims(1, 1 << 34, 1 << 30, 8), dims(1, 16, 1, 1 << 60)] {
        let error = Problem::dense(dims, DType::F32, &Options::new()).unwrap_err();
        assert!(error.to_string().contains("2^48"), "{error}");
    }
    let sequences = dims(1 << 45, 1, 0, 8);
    let error = Problem::dense(sequences, DType::F32, &Options::new()).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    // Countable, but more than any address space: an error and no abort.
    let dims = dims(1, 1 << 15, 1 << 30, 8);
    let problem = Problem::dense(dims, DType::F64, &Options::new()).unwrap();
    let error = Engine::named("cpu")
        .unwrap()
        .begin(&problem)
        .err()
        .expect("a state of 2^45 rows was made");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let error = HostState::empty([1 << 20, 1 << 20, 1], 8).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    // A state's shape is the caller's word: compared, not multiplied.
    let dims = Dims {
        batch: 1,
        num_heads: 1,
        num_kv_heads: 1,
        seqlen_q: 1,
        seqlen_k: 1,
        head_dim: 8,
        head_dim_v: 8,
    };
    let problem = Problem::dense(dims, DType::F32, &Options::new()).unwrap();
    let mut state = Engine::named("cpu").unwrap().begin(&problem).unwrap();
    let mut foreign = state.export().unwrap();
    foreign.shape = [usize::MAX; 3];
    let error = state.merge(&foreign).unwrap_err();
    assert!(error.to_string().starts_with("state: "), "{error}");
}

#[test]
fn lengths_that_do_not_fit() {
    let lengths = ErrorClass::Lengths;
    let packed = |q: &'static [i32], k: &'static [i32]| packed_good().packed(q, k);
    refused(packed(&[], &[]), Options::new(), lengths, "cu_seqlens_q");
    refused(
        packed(&[1, 3], &[0, 5]),
        Options::new(),
        lengths,
        "cu_seqlens_q",
    );
    refused(
        packed(&[0, 3], &[0, 6]),
        Options::new(),
        lengths,
        "cu_seqlens_k",
    );
    refused(
        packed(&[0, 4], &[0, 5]),
        Options::new(),
        lengths,
        "cu_seqlens_q",
    );
    refused(
        packed(&[0, 2, 1], &[0, 1, 5]),
        Options::new(),
        lengths,
        "cu_seqlens_q",
    );
    refused(
        packed(&[0, 1, 3], &[0, 5]),
        Options::new(),
        lengths,
        "cu_seqlens_k",
    );
    refused(
        packed(&[0, -1, 3], &[0, 1, 5]),
        Options::new(),
        lengths,
        "cu_seqlens_q",
    );
    let mut one_sided = packed_good();
    one_sided.lengths.cu_seqlens_q = Some(&[0, 3]);
    refused(one_sided, Options::new(), lengths, "cu_seqlens_k");
    refused(
        good().packed(&[0, 3], &[0, 5]),
        Options::new(),
        ErrorClass::Shape,
        "batch",
    );
    refused(
        good().seqused_k(&[5]),
        Options::new(),
        ErrorClass::Shape,
        "seqused_k",
    );
    refused(
        good().seqused_k(&[5, 6]),
        Options::new(),
        lengths,
        "seqused_k",
    );
    refused(
        good().seqused_k(&[5, -1]),
        Options::new(),
        lengths,
        "seqused_k",
    );
    let long = packed_good()
        .packed(&[0, 1, 3], &[0, 2, 5])
        .seqused_k(&[3, 1]);
    refused(long, Options::new(), lengths, "seqused_k");
}

#[test]
fn block_tables_that_do_not_fit() {
    // Three pages of four keys, two sequences.
    let paged = |pages: &'static [i32], width, used: &'static [i32]| {
        Inputs::new(
            view([B, HQ, SQ, D]),
            view([3, HK, 4, D]),
            view([3, HK, 4, D]),
        )
        .paged(BlockTable { pages, width }, used)
    };
    let table = ErrorClass::Table;
    refused(
        paged(&[0, 3, 1, 2], 2, &[8, 8]),
        Options::new(),
        table,
        "block_table",
    );
    refused(
        paged(&[0, -1, 1, 2], 2, &[5, 8]),
        Options::new(),
        table,
        "block_table",
    );
    refused(
        paged(&[0, 1, 2], 2, &[5, 8]),
        Options::new(),
        table,
        "block_table",
    );
    refused(
        paged(&[0, 1], 1, &[5, 4]),
        Options::new(),
        ErrorClass::Lengths,
        "seqused_k",
    );
    // An entry that no used key needs is not looked at.
    let inputs = paged(&[0, -1, 1, 2], 2, &[4, 8]);
    assert!(
        Engine::named("cpu")
            .unwrap()
            .forward(&inputs, &Options::new())
            .is_ok()
    );
    let mut unknown = paged(&[0, 1, 1, 2], 2, &[4, 8]);
    unknown.lengths.seqused_k = None;
    refused(unknown, Options::new(), ErrorClass::Lengths, "seqused_k");
}

#[test]
fn outputs_that_do_not_fit() {
    let engine = Engine::named("cpu").unwrap();
    let mut memory = vec![0f32; 4096];
    for shape in [[B, HQ, SQ, D + 1], [B, HK, SQ, D], [1, HQ, SQ, D]] {
        let out = TensorViewMut::bhsd(&mut memory, shape).unwrap();
        let error = engine
            .forward_into(Algorithm::Fa2, &good(), &Options::new(), out, None)
            .unwrap_err();
        assert!(
            matches!(&error, Error::Shape { tensor, .. } if tensor == "out"),
            "{error}"
        );
    }
    let mut lse = vec![0f32; 64];
    let error = engine
        .forward_into(
            Algorithm::Fa2,
            &good(),
            &Options::new(),
            TensorViewMut::bhsd(&mut memory, [B, HQ, SQ, D]).unwrap(),
            Some(TensorViewMut::bhs(&mut lse, [B, HQ, SQ + 1]).unwrap()),
        )
        .unwrap_err();
    assert!(
        matches!(&error, Error::Shape { tensor, .. } if tensor == "lse"),
        "{error}"
    );
}

proptest! {
    /// Whatever the shapes and lengths: a result or an error, and every byte read lies inside.
    #[test]
    fn no_input_panics(
        shapes in [[0usize..4, 0usize..4, 0usize..6, 0usize..10],
                   [0usize..4, 0usize..4, 0usize..6, 0usize..10],
                   [0usize..4, 0usize..4, 0usize..6, 0usize..10]],
        cu_q in proptest::option::weighted(0.3, proptest::collection::vec(-2i32..8, 0..4)),
        cu_k in proptest::option::weighted(0.3, proptest::collection::vec(-2i32..8, 0..4)),
        used in proptest::option::weighted(0.3, proptest::collection::vec(-2i32..8, 0..4)),
        table in proptest::option::weighted(0.2, (proptest::collection::vec(-1i32..4, 0..6), 0usize..4)),
        bias in proptest::option::weighted(0.3, [0usize..4, 0usize..4, 0usize..6, 0usize..6]),
        causal in any::<bool>(),
        algorithm in 0usize..3,
    ) {
        let mut inputs = Inputs::new(view(shapes[0]), view(shapes[1]), view(shapes[2]))
            .bias(bias.map(view));
        inputs.lengths.cu_seqlens_q = cu_q.as_deref();
        inputs.lengths.cu_seqlens_k = cu_k.as_deref();
        inputs.lengths.seqused_k = used.as_deref();
        inputs.block_table = table.as_ref().map(|(pages, width)| BlockTable { pages, width: *width });
        let options = Options::new().causal(causal);
        let result = Engine::named("cpu").unwrap().forward_with(Algorithm::ALL[algorithm], &inputs, &options);
        if let Ok(attention) = result {
            // The tensors hold zeros: whatever fits gives zeros.
            prop_assert!(attention.out.iter().all(|&x| x == 0.0));
        }
    }
}
