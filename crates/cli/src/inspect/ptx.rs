//! PTX as text: functions, instructions, and where a register's address comes from.

use std::collections::{BTreeSet, HashMap, HashSet};

/// A kernel or function with a body.
#[derive(Clone, Debug, Default)]
pub(super) struct Function {
    pub(super) name: String,
    /// Names of the parameters, in order.
    pub(super) params: Vec<String>,
    pub(super) body: Vec<Instruction>,
    /// Instruction before which each label stands.
    pub(super) labels: HashMap<String, usize>,
}

/// One instruction.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Instruction {
    /// Executed only if a predicate says so.
    pub(super) predicated: bool,
    /// With its modifiers: `st.global.v4.f32`.
    pub(super) op: String,
    pub(super) operands: Vec<String>,
}

/// Bytes from the start of a parameter: where a kernel's argument block holds a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Pointer {
    pub(super) param: usize,
    pub(super) offset: i64,
}

/// The kernels of a PTX file.
///
/// # Errors
/// If it is no PTX.
pub(super) fn parse(text: &str) -> Result<Vec<Function>, String> {
    if !text
        .lines()
        .any(|line| line.trim_start().starts_with(".version"))
    {
        return Err("no PTX: it has no .version".into());
    }
    // Lines that end without a semicolon.
    let kept: Vec<&str> = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .filter(|line| {
            let line = line.trim_start();
            ![".loc", ".file", ".section"]
                .iter()
                .any(|start| line.starts_with(start))
        })
        .collect();
    let text = kept.join("\n");
    let mut functions = Vec::new();
    let mut rest = &text[..];
    while let Some(at) = rest.find(".entry") {
        rest = &rest[at + ".entry".len()..];
        let (Some(open), Some(start)) = (rest.find('('), rest.find('{')) else {
            break;
        };
        let name = rest[..open.min(start)].trim().to_string();
        let close = rest
            .find(')')
            .filter(|&close| open < close && close < start);
        let params = close.map_or(Vec::new(), |close| parameters(&rest[open + 1..close]));
        let (body, after) = block(&rest[start..]).ok_or(format!("{name}: its body has no end"))?;
        functions.push(function(name, params, body));
        rest = after;
    }
    Ok(functions)
}

/// The last word of each declaration, less an array's size.
fn parameters(text: &str) -> Vec<String> {
    text.split(',')
        .filter_map(|one| one.split_whitespace().next_back())
        .map(|word| word.split('[').next().unwrap_or_default().to_string())
        .collect()
}

/// What stands in the braces at the start of `text`, and what follows them.
fn block(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return Some((&text[1..at], &text[at + 1..]));
                }
            }
            _ => {}
        }
    }
    None
}

fn function(name: String, params: Vec<String>, body: &str) -> Function {
    let mut function = Function {
        name,
        params,
        ..Function::default()
    };
    let mut statement = String::new();
    for c in body.chars() {
        let empty = statement.trim().is_empty();
        match c {
            // Braces at the start of a statement open and close scopes of inline assembly.
            '{' | '}' if empty => {}
            ':' if is_label(statement.trim()) => {
                let at = function.body.len();
                function.labels.insert(statement.trim().to_string(), at);
                statement.clear();
            }
            ';' => {
                function.body.extend(instruction(statement.trim()));
                statement.clear();
            }
            c => statement.push(c),
        }
    }
    function
}

fn is_label(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('.')
        && text
            .chars()
            .all(|c| c.is_alphanumeric() || c == '_' || c == '$')
}

fn instruction(text: &str) -> Option<Instruction> {
    if text.is_empty() || text.starts_with('.') {
        return None;
    }
    let (predicated, text) = match text.strip_prefix('@') {
        Some(rest) => (true, rest.split_once(char::is_whitespace)?.1.trim_start()),
        None => (false, text),
    };
    let (op, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    Some(Instruction {
        predicated,
        op: op.to_string(),
        operands: operands(rest),
    })
}

/// Split at commas outside braces and brackets.
fn operands(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    let (mut depth, mut one) = (0usize, String::new());
    for c in text.chars() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                all.push(one.trim().to_string());
                one.clear();
                continue;
            }
            _ => {}
        }
        one.push(c);
    }
    if !one.trim().is_empty() {
        all.push(one.trim().to_string());
    }
    all
}

impl Instruction {
    pub(super) fn is(&self, start: &str) -> bool {
        let rest = self.op.strip_prefix(start);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// Bytes that one thread moves: the type's size times the vector's length.
    pub(super) fn bytes(&self) -> u32 {
        let parts = self.op.split('.').skip(1);
        let vector = parts
            .clone()
            .find_map(|part| part.strip_prefix('v')?.parse::<u32>().ok())
            .unwrap_or(1);
        // The type is the last part with a size in it: f32, b128, and f16x2 for two of 16 bits.
        let bits = parts.filter_map(|part| {
            let digits = part.trim_start_matches(|c: char| c.is_ascii_alphabetic());
            let mut sizes = digits.split('x').map(str::parse::<u32>);
            let size = sizes.next()?.ok()?;
            Some(size * sizes.next().and_then(Result::ok).unwrap_or(1))
        });
        let bits = bits.last();
        vector * bits.unwrap_or(0) / 8
    }

    /// The register, or registers of a vector, that it writes.
    fn writes(&self) -> impl Iterator<Item = &str> {
        let stores = [
            "st", "bra", "ret", "bar", "cp", "red", "exit", "membar", "fence",
        ];
        let none = stores.iter().any(|op| self.is(op));
        let first = self.operands.first().filter(|_| !none);
        let text = first.map_or("", String::as_str);
        // setp writes a pair as %p1|%p2.
        text.trim_matches(['{', '}'])
            .split([',', '|'])
            .map(str::trim)
            .filter(|register| register.starts_with('%'))
    }
}

/// Register or name, and the constant added to it, of `[%rd1+-8]`; of a tensor map with its coordinates,
/// `[%rd1, {%r1, %r2}]`, that of the map.
pub(super) fn address(operand: &str) -> Option<(&str, i64)> {
    let inner = operand.strip_prefix('[')?.strip_suffix(']')?.trim();
    let inner = inner.split(',').next().unwrap_or_default().trim();
    match inner.split_once('+') {
        Some((base, offset)) => Some((base.trim(), offset.trim().parse().ok()?)),
        None => Some((inner, 0)),
    }
}

/// Where registers are written.
pub(super) struct Definitions<'a> {
    function: &'a Function,
    of: HashMap<&'a str, Vec<usize>>,
}

impl<'a> Definitions<'a> {
    pub(super) fn new(function: &'a Function) -> Self {
        let mut of: HashMap<&str, Vec<usize>> = HashMap::new();
        for (at, instruction) in function.body.iter().enumerate() {
            for register in instruction.writes() {
                of.entry(register).or_default().push(at);
            }
        }
        Definitions { function, of }
    }

    /// The pointers of the argument block from which the address in `register` can come: every value that
    /// is added up to it, wherever it was written, is followed back to the parameters. Factors of products
    /// are not: they are indices and strides.
    pub(super) fn pointers(&self, register: &str) -> BTreeSet<Pointer> {
        let mut found = BTreeSet::new();
        let mut seen = HashSet::new();
        let mut open = vec![register];
        while let Some(register) = open.pop() {
            if !seen.insert(register) {
                continue;
            }
            for &at in self.of.get(register).map_or(&[][..], Vec::as_slice) {
                let instruction = &self.function.body[at];
                let sources: &[usize] = match instruction.op.split('.').next().unwrap_or_default() {
                    "ld" if instruction.is("ld.param") => {
                        found.extend(self.loaded(instruction, register));
                        &[]
                    }
                    "mov" | "cvta" => &[1],
                    "add" | "or" | "selp" => &[1, 2],
                    "sub" => &[1],
                    "mad" => &[3],
                    _ => &[],
                };
                let operands = sources
                    .iter()
                    .filter_map(|&at| instruction.operands.get(at));
                open.extend(operands.map(String::as_str).filter(|o| o.starts_with('%')));
            }
        }
        found
    }

    /// The argument whose own address `register` holds: a tensor map is passed by value and named by its
    /// place.
    pub(super) fn argument(&self, register: &str) -> Option<Pointer> {
        let (param, offset) = self.parameter(register, 0)?;
        Some(Pointer { param, offset })
    }

    /// The pointer that a `ld.param` of 64 bits puts into `register`.
    fn loaded(&self, load: &Instruction, register: &str) -> Option<Pointer> {
        let wide = ["u64", "s64", "b64"].iter().any(|t| load.op.ends_with(t));
        let (base, offset) = address(load.operands.get(1)?)?;
        let (param, start) = self.parameter(base, 0)?;
        let place = load.writes().position(|written| written == register)?;
        wide.then_some(Pointer {
            param,
            offset: start + offset + 8 * place as i64,
        })
    }

    /// The parameter that `name` is, or whose address a register holds, and how far into it.
    fn parameter(&self, name: &str, depth: usize) -> Option<(usize, i64)> {
        if let Some(param) = self.function.params.iter().position(|p| p == name) {
            return Some((param, 0));
        }
        let [at] = self.of.get(name)?[..] else {
            return None;
        };
        let instruction = &self.function.body[at];
        let source = instruction.operands.get(1)?;
        let (param, offset) = (depth < 32).then(|| self.parameter(source, depth + 1))??;
        match instruction.op.split('.').next()? {
            "mov" | "cvta" => Some((param, offset)),
            "add" => Some((
                param,
                offset + instruction.operands.get(2)?.parse::<i64>().ok()?,
            )),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
.version 8.0
.target sm_80
.visible .entry first(
	.param .align 8 .b8 first_param_0[32],
	.param .u64 first_param_1
)
.maxntid 128, 1, 1
{
	.reg .b64 %rd<9>; // registers
	.reg .pred %p<2>;
	mov.b64 %rd1, first_param_0;
	add.s64 %rd2, %rd1, 16;
	ld.param.u64 %rd3, [%rd2+-8];
	ld.param.v2.u64 {%rd5, %rd6}, [first_param_0+16];
	cvta.to.global.u64 %rd4, %rd3;
	{ .reg .b32 t; mov.b32 t, %r1; }
$L__BB0_1:
	mad.lo.s64 %rd7, %rd5, 4, %rd4;
	@%p1 st.global.v2.f32 [%rd7+8], {%f1, %f2};
	ld.param.u64 %rd8, [first_param_1];
	@!%p1 bra $L__BB0_1;
	ret;
}
";

    #[test]
    fn functions_instructions_and_labels_are_read() {
        let functions = parse(TEXT).unwrap();
        let [function] = &functions[..] else { panic!() };
        assert_eq!(function.name, "first");
        assert_eq!(function.params, ["first_param_0", "first_param_1"]);
        assert_eq!(function.labels["$L__BB0_1"], 6);
        let store = &function.body[7];
        assert!(store.predicated && store.is("st.global") && !store.is("st.glob"));
        assert_eq!(store.operands, ["[%rd7+8]", "{%f1, %f2}"]);
        assert_eq!(store.bytes(), 8);
        assert_eq!(address(&store.operands[0]), Some(("%rd7", 8)));
        assert!(parse("#include <cuda.h>").is_err());
        assert!(parse(".version 8.0\n.entry x() { ret;").is_err());
    }

    #[test]
    fn a_tensor_map_is_found_by_its_place() {
        let text = ".version 8.0
.visible .entry f(.param .align 128 .b8 f_param_0[384])
{
	mov.b64 %rd1, f_param_0;
	cvta.param.u64 %rd2, %rd1;
	add.s64 %rd3, %rd2, 128;
	cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd3, {%r2, %r3, %r4, %r5}], [%r6];
	ret;
}";
        let functions = parse(text).unwrap();
        let copy = &functions[0].body[3];
        let (base, offset) = address(&copy.operands[1]).unwrap();
        assert_eq!((base, offset), ("%rd3", 0));
        let found = Definitions::new(&functions[0]).argument(base);
        assert_eq!(
            found,
            Some(Pointer {
                param: 0,
                offset: 128
            })
        );
    }

    #[test]
    fn addresses_are_followed_to_their_pointer_and_not_through_factors() {
        let functions = parse(TEXT).unwrap();
        let definitions = Definitions::new(&functions[0]);
        let pointer = |param, offset| BTreeSet::from([Pointer { param, offset }]);
        assert_eq!(definitions.pointers("%rd7"), pointer(0, 8));
        assert_eq!(definitions.pointers("%rd6"), pointer(0, 24));
        assert_eq!(definitions.pointers("%rd8"), pointer(1, 0));
        assert!(definitions.pointers("%rd99").is_empty());
    }
}
