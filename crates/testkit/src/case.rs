//! Random problems.

use std::ops::Range;

use proptest::option::weighted;
use proptest::prelude::*;
use proptest::test_runner::Config;
use tilewise_core::{Alignment, DType, Dims, Options};

use crate::{Layout, Noise, layout};

/// What says how long the sequences are.
#[derive(Clone, Debug)]
pub enum Sequences {
    /// The shapes.
    Dense,
    /// Used lengths, one a batch entry, in percent of seqlen_k.
    Used(Vec<usize>),
    /// Packed: lengths of q and k of each sequence, and whether used lengths cut some keys off.
    Packed(Vec<(usize, usize)>, bool),
    /// Pages of so many keys; used lengths as in `Used`.
    Paged(usize, Vec<usize>),
}

/// A random problem. Its data follow from the seed.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of the tensors and of everything else that is drawn.
    pub seed: u64,
    /// Where the test chooses none of its own.
    pub dtype: DType,
    /// Batch entries, where the sequences are not packed.
    pub batch: usize,
    /// Heads of k and v.
    pub num_kv_heads: usize,
    /// Heads of q that share one of k and v.
    pub group: usize,
    /// Rows, where the sequences are not packed.
    pub seqlen_q: usize,
    /// Keys, where the sequences are neither packed nor paged.
    pub seqlen_k: usize,
    /// Of q and k.
    pub head_dim: usize,
    /// Of v and out.
    pub head_dim_v: usize,
    /// Lengths.
    pub sequences: Sequences,
    /// Of q, k and v; bias and mask lie as q and k do.
    pub layouts: [Layout; 3],
    /// Causality, windows, softmax_scale, softcap; slopes and sinks are apart.
    pub options: Options,
    /// Whether there are slopes.
    pub alibi: bool,
    /// Whether there are sinks.
    pub sinks: bool,
    /// Which axes of the bias are broadcast; `None`: no bias.
    pub bias: Option<[bool; 4]>,
    /// Which axes of the mask are broadcast; `None`: no mask.
    pub mask: Option<[bool; 4]>,
    /// Size of the elements of q and k.
    pub magnitude: f64,
    /// B_r and B_c.
    pub blocks: (usize, usize),
}

/// How large the problems are.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Of q.
    pub seqlen_q: BoxedStrategy<usize>,
    /// Of k and v.
    pub seqlen_k: BoxedStrategy<usize>,
    /// Of q and k, and of v and out.
    pub head_dim: BoxedStrategy<usize>,
    /// Windows to either side.
    pub window: Range<usize>,
    /// Rows and keys of a packed sequence.
    pub packed: (Range<usize>, Range<usize>),
    /// Keys of a page.
    pub page: Range<usize>,
}

impl Sizes {
    /// A few rows and keys: for what is slow, or reads better small.
    pub fn tiny() -> Self {
        Sizes {
            seqlen_q: (0usize..20).boxed(),
            seqlen_k: (0usize..24).boxed(),
            head_dim: (1usize..20).boxed(),
            window: 0..9,
            packed: (0..9, 0..11),
            page: 1..6,
        }
    }

    /// Over the tiles of the kernels, and well beyond.
    pub fn of_tiles() -> Self {
        Sizes {
            seqlen_q: prop_oneof![6 => 1usize..40, 2 => 40usize..200, 1 => Just(0usize)].boxed(),
            seqlen_k: prop_oneof![4 => 1usize..70, 4 => 70usize..600, 1 => Just(0usize)].boxed(),
            head_dim: prop_oneof![4 => 1usize..40, 2 => 40usize..140].boxed(),
            window: 0..80,
            packed: (0..60, 0..150),
            page: 1..21,
        }
    }

    /// Between the two, with the head dimensions that models have.
    pub fn of_models() -> Self {
        let seqlen = prop_oneof![
            1 => Just(0usize),
            2 => Just(1usize),
            8 => 2usize..=70,
            2 => 71usize..=330
        ];
        Sizes {
            seqlen_q: seqlen.clone().boxed(),
            seqlen_k: seqlen.boxed(),
            head_dim: prop_oneof![
                4 => 1usize..=40,
                2 => prop_oneof![Just(32usize), Just(64), Just(80), Just(96), Just(128)],
                1 => 41usize..=140,
            ]
            .boxed(),
            window: 0..90,
            packed: (0..60, 0..90),
            page: 1..33,
        }
    }
}

fn sequences(sizes: &Sizes) -> impl Strategy<Value = Sequences> + use<> {
    let percent = || proptest::collection::vec(0usize..=100, 3);
    let lengths = proptest::collection::vec(sizes.packed.clone(), 0..4);
    prop_oneof![
        4 => Just(Sequences::Dense),
        1 => percent().prop_map(Sequences::Used),
        1 => (lengths, any::<bool>()).prop_map(|(lengths, cut)| Sequences::Packed(lengths, cut)),
        1 => (sizes.page.clone(), percent()).prop_map(|(page, used)| Sequences::Paged(page, used)),
    ]
}

fn options(sizes: &Sizes) -> impl Strategy<Value = Options> + use<> {
    (
        any::<bool>(),
        any::<bool>(),
        weighted(0.3, sizes.window.clone()),
        weighted(0.3, sizes.window.clone()),
        weighted(
            0.3,
            prop_oneof![Just(0.0), Just(-0.7), Just(3.0), 0.01f64..2.0],
        ),
        weighted(0.3, 0.5f64..60.0),
    )
        .prop_map(|(causal, top_left, left, right, scale, softcap)| {
            Options::new()
                .causal(causal)
                .alignment(if top_left {
                    Alignment::TopLeft
                } else {
                    Alignment::BottomRight
                })
                .window_left(left)
                .window_right(right)
                .softmax_scale(scale)
                .softcap(softcap)
        })
}

/// Any problem of such sizes.
pub fn case(sizes: &Sizes) -> impl Strategy<Value = Case> + use<> {
    let dtype = prop_oneof![
        Just(DType::F64),
        Just(DType::F32),
        Just(DType::F16),
        Just(DType::BF16)
    ];
    let heads = (1usize..3, 1usize..3, 1usize..4);
    let dims = (
        sizes.seqlen_q.clone(),
        sizes.seqlen_k.clone(),
        sizes.head_dim.clone(),
        prop_oneof![
            10 => sizes.head_dim.clone().prop_map(Some),
            10 => Just(None),
            1 => Just(Some(0))
        ],
    );
    let extras = (
        proptest::bool::weighted(0.3),
        proptest::bool::weighted(0.3),
        weighted(0.3, any::<[bool; 4]>()),
        weighted(0.3, any::<[bool; 4]>()),
        prop_oneof![6 => Just(1.0), 1 => Just(1e-3), 1 => Just(12.0)],
    );
    let memory = (
        sequences(sizes),
        [layout(), layout(), layout()],
        any::<u64>(),
        (1usize..9, 1usize..9),
    );
    (dtype, heads, dims, options(sizes), extras, memory).prop_map(
        |(dtype, heads, dims, options, extras, memory)| Case {
            seed: memory.2,
            dtype,
            batch: heads.0,
            num_kv_heads: heads.1,
            group: heads.2,
            seqlen_q: dims.0,
            seqlen_k: dims.1,
            head_dim: dims.2,
            head_dim_v: dims.3.unwrap_or(dims.2),
            sequences: memory.0,
            layouts: memory.1,
            options,
            alibi: extras.0,
            sinks: extras.1,
            bias: extras.2,
            mask: extras.3,
            magnitude: extras.4,
            blocks: memory.3,
        },
    )
}

impl Case {
    /// Dense tensors of those sizes in f32, one after another in memory, and no option: to be changed by struct update.
    pub fn dense(seed: u64, dims: Dims) -> Case {
        Case {
            seed,
            dtype: DType::F32,
            batch: dims.batch,
            num_kv_heads: dims.num_kv_heads,
            group: dims.num_heads / dims.num_kv_heads,
            seqlen_q: dims.seqlen_q,
            seqlen_k: dims.seqlen_k,
            head_dim: dims.head_dim,
            head_dim_v: dims.head_dim_v,
            sequences: Sequences::Dense,
            layouts: [Layout::Bhsd; 3],
            options: Options::new(),
            alibi: false,
            sinks: false,
            bias: None,
            mask: None,
            magnitude: 1.0,
            blocks: (3, 4),
        }
    }

    /// Heads of q.
    pub fn num_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }

    /// The options, slopes and sinks included.
    pub fn options(&self) -> Options {
        let heads = self.num_heads();
        let mut noise = Noise(self.seed ^ 0xA5A5);
        // Of both signs: an implementation need not rely on slopes that lower the scores.
        let slopes: Vec<f32> = tilewise_core::alibi_slopes(heads)
            .into_iter()
            .map(|slope| slope * noise.number() as f32)
            .collect();
        let sinks: Vec<f32> = (0..heads).map(|_| noise.number() as f32).collect();
        self.options
            .clone()
            .alibi_slopes(self.alibi.then_some(slopes))
            .sinks(self.sinks.then_some(sinks))
    }
}

/// `PROPTEST_CASES` cases, or `n` where it is unset.
pub fn cases(n: u32) -> Config {
    let mut config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = n;
    }
    config
}
