//! Compiles the committed list of kernel variants and compares what the assembler says of registers,
//! stack and spills with the committed table. Needs NVRTC (`TILEWISE_NVRTC`), but no GPU.
//!
//! `kernel_resources` checks; `kernel_resources --write` writes the table anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewise_core::DType;
use tilewise_cuda::kernels::{
    Mask, Score, Selection, Spec, Variant, backward, compute_of, fa2, fa2_wide, hopper, list,
    shared_limit, standard,
};
use tilewise_cuda::nvrtc::Nvrtc;

/// Most variants: all of them compile within minutes on two cores.
const MOST: usize = 175;

/// Registers a thread, bytes of stack, bytes of spill stores.
type Use = (u32, u32, u32);

/// The variants that are compiled for each architecture: every fa2 kernel that lies on 16 bytes, one
/// of each other kind, and for chips with little shared memory one to show that its tiles fit.
fn chosen(arch: &str) -> Vec<Variant> {
    let compute = compute_of(arch).unwrap_or_default();
    let all = list(
        compute,
        &Selection {
            dtypes: vec![DType::BF16, DType::F16, DType::F32],
            head_dims: vec![64, 128, 256],
            score: true,
            strided: true,
            options: false,
        },
    );
    let more = match compute {
        86 | 89 => Vec::new(),
        _ => with_options(compute),
    };
    all.into_iter()
        .chain(more)
        .filter(|variant| {
            let name = variant.name.as_str();
            let has = |part: &str| name.contains(part);
            if !name.starts_with("bwd")
                && !name.starts_with("decode")
                && (has("-modified") || has("wide"))
            {
                return true;
            }
            let plain = !has("-score") && !has("-strided");
            let state = has("-state1");
            if name.starts_with("fa2-") && !has("-f32-") && !has("-d256-") && has("-wm1-") {
                // For few row blocks: masks and types differ there as they do below.
                let one = compute == 90 || compute == 80 && has("-d128-");
                return one && plain && has("-bf16-") && has("-causal");
            }
            if matches!(compute, 86 | 89) {
                return has("fa2-bf16-d128-causal") && plain && !state && !has("-dq0-");
            }
            if name.starts_with("fa2") {
                return match (state, plain) {
                    // f16 differs from bf16 in one instruction.
                    (false, true) => !has("-f16-") || has("-d128-causal"),
                    (true, _) => has("-d128-band") && !has("-strided"),
                    (false, false) => has("-d64-causal-score"),
                };
            }
            if name.starts_with("bwd") {
                let both = has("bwd-fa2-bf16-d64-") || has("bwd-fa2-bf16-d128-");
                let causal = plain && !has("-dropout") && has("-causal");
                if has("bwd-hopper") {
                    let one = has("-turns1-") && has("-care0-") || has("-d128-");
                    return causal && has("-bf16-") && one;
                }
                let narrow = both && has("-dq1-") || has("bwd-dq-bf16-d128-");
                return causal && (narrow || has("bwd-wide-"));
            }
            if name.starts_with("decode") {
                let plain = plain && !has("-modified");
                // The plain ones of a head_dim of 128, and for Hopper one of each other kind.
                let wide = compute == 90 && (has("decode-f32-d128") || has("-bf16-d256"));
                return match (plain, has("-paged1")) {
                    (true, false) => has("decode-bf16-d128") && !has("-once1") || wide,
                    _ => {
                        compute == 90 && has("-f16-d64-band-modified-strided-wm1") && has("-paged1")
                    }
                };
            }
            if name.starts_with("fa1") || name.starts_with("hopper") {
                let every = name.starts_with("hopper") && has("-bf16-") && !has("-band");
                let capped = has("hopper-bf16-d128-causal-score") || has("-dv128-score");
                return capped || plain && (has("-causal") || every);
            }
            if name.starts_with("standard") {
                return plain
                    && !has("f16-")
                    && (has("-d128-") || has("softmax"))
                    && has("-causal")
                    || has("softmax-bf16-d64-band-score");
            }
            if name.starts_with("split") {
                return has("-d128");
            }
            if name.starts_with("ceiling") {
                return has("mma-bf16");
            }
            !has("-f16-")
        })
        .collect()
}

/// One of each kind of kernel that options ask for.
fn with_options(compute: i32) -> Vec<Variant> {
    let limit = shared_limit(compute);
    let spec = |dtype, padded, mask| Spec {
        mask,
        score: Score::Modified,
        extras: true,
        pairs: dtype == DType::F32,
        ..Spec::plain(dtype, padded)
    };
    let all = Spec {
        dropout: true,
        sequences: true,
        ..spec(DType::BF16, 128, Mask::Upper)
    };
    let wide = |dtype| Spec {
        score: Score::Folded,
        extras: false,
        pairs: false,
        ..spec(dtype, 256, Mask::Upper)
    };
    let distances = Spec {
        extras: false,
        ..spec(DType::BF16, 128, Mask::Full)
    };
    let mut found = vec![
        fa2::variant(&all, limit, false),
        fa2::variant(&spec(DType::F32, 64, Mask::Full), limit, false),
        fa2::variant(&spec(DType::BF16, 256, Mask::Upper), limit, false),
        fa2::variant(&distances, limit, false),
    ];
    for dtype in [DType::BF16, DType::F32] {
        found.push(fa2_wide::variant(
            &wide(dtype),
            fa2_wide::tile(dtype, 512),
            limit,
        ));
    }
    if let Some(cut) = backward::wide::cut(&wide(DType::BF16), [512, 512], limit) {
        found.extend([Some(cut.keys), Some(cut.rows)]);
    }
    found.extend(standard::variants(&all, limit, 1 << 20));
    // Columns that fill no panel, values of their own, and what changes scores.
    let columns = |padded, padded_v, score| Spec {
        padded_v,
        score,
        pairs: false,
        ..spec(DType::BF16, padded, Mask::Upper)
    };
    for spec in [
        all,
        columns(64, 64, Score::Modified),
        columns(256, 256, Score::Modified),
        columns(128, 128, Score::Applied),
        columns(80, 80, Score::Folded),
        columns(192, 192, Score::Folded),
        columns(192, 128, Score::Applied),
    ] {
        let kernel = hopper::variant(&spec, usize::MAX, compute, limit);
        found.push(kernel.map(|(variant, _)| variant));
    }
    found.into_iter().flatten().collect()
}

fn number_before(log: &str, what: &str) -> Option<u32> {
    let end = log.find(what)?;
    log[..end].split_whitespace().next_back()?.parse().ok()
}

fn measure(nvrtc: &Nvrtc, arch: &str, variant: &Variant) -> Result<Use, String> {
    let whole = variant.compile(nvrtc, arch)?.log;
    // Products of a warpgroup that do not overlap, and registers that do not change hands.
    if let Some(loss) = whole.lines().find(|line| line.contains("(C75")) {
        return Err(loss.to_owned());
    }
    // A source may hold several kernels, each with its own lines.
    let log = whole
        .split_once(&format!("'{}'", variant.entry))
        .map_or("", |(_, own)| own);
    let registers = log
        .split("Used ")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    match (
        registers,
        number_before(log, " bytes stack frame"),
        number_before(log, " bytes spill stores"),
    ) {
        (Some(registers), Some(stack), Some(spill)) => Ok((registers, stack, spill)),
        _ => Err(format!("the assembler's report cannot be read: {whole}")),
    }
}

fn read(table: &str) -> BTreeMap<(String, String), Use> {
    table
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let key = (words.next()?.to_owned(), words.next()?.to_owned());
            let mut next = || words.next()?.parse().ok();
            Some((key, (next()?, next()?, next()?)))
        })
        .collect()
}

fn main() -> ExitCode {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel_resources.txt");
    let write = std::env::args().nth(1).as_deref() == Some("--write");
    let nvrtc = match Nvrtc::find(None) {
        Ok(nvrtc) => nvrtc,
        Err(reason) => {
            eprintln!("{reason}");
            return ExitCode::FAILURE;
        }
    };
    println!("{nvrtc}");
    let work: Vec<(&str, Variant)> = ["sm_80", "sm_86", "sm_89", "sm_90a"]
        .into_iter()
        .flat_map(|arch| chosen(arch).into_iter().map(move |variant| (arch, variant)))
        .collect();
    assert!(work.len() <= MOST, "{} variants are too many", work.len());
    let allowed = read(&std::fs::read_to_string(&path).unwrap_or_default());
    let (next, faults, found) = (
        AtomicUsize::new(0),
        Mutex::new(Vec::new()),
        Mutex::new(BTreeMap::new()),
    );
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((arch, variant)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let fault = |text: String| {
                        let line = format!("{arch} {}: {text}", variant.name);
                        faults.lock().unwrap().push(line);
                    };
                    let limit = shared_limit(compute_of(arch).unwrap_or_default());
                    if variant.shared > limit {
                        fault(format!(
                            "{} bytes of shared memory of {limit}",
                            variant.shared
                        ));
                    }
                    let used = match measure(&nvrtc, arch, variant) {
                        Ok(used) => used,
                        Err(log) => {
                            fault(log);
                            continue;
                        }
                    };
                    let key = ((*arch).to_owned(), variant.name.clone());
                    match allowed.get(&key) {
                        Some(&(_, stack, spill)) if used.1 <= stack && used.2 <= spill => {}
                        Some(&(_, stack, spill)) if !write => fault(format!(
                            "stack {} and spills {} where {stack} and {spill} are allowed",
                            used.1, used.2
                        )),
                        None if !write => fault("is not in the table".into()),
                        _ => {}
                    }
                    found.lock().unwrap().insert(key, used);
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    if write {
        let mut text = format!(
            "# What kernels may use, by {} {}.{}: architecture, variant, registers, bytes of stack, bytes of spill stores.\n\
             # Checked and written by examples/kernel_resources.rs; registers are for information.\n",
            "NVRTC",
            nvrtc.version().0,
            nvrtc.version().1
        );
        for ((arch, name), (registers, stack, spill)) in &found {
            let _ = writeln!(text, "{arch} {name} {registers} {stack} {spill}");
        }
        if let Err(error) = std::fs::write(&path, text) {
            eprintln!("{}: {error}", path.display());
            return ExitCode::FAILURE;
        }
    }
    let faults = faults.into_inner().unwrap();
    for fault in &faults {
        eprintln!("{fault}");
    }
    println!("{} kernels compiled, {} faults", found.len(), faults.len());
    if faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
