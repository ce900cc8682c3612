//! Checks a document against a JSON schema (draft 2020-12), with the few keywords that ours use. A
//! keyword that is not known here is an error, so that none is passed over in silence.

use serde_json::{Map, Value as Json};

/// A schema.
pub struct Schema(Json);

/// Where a document breaks the schema, in the document; and how.
pub type Broken = String;

/// Keywords that demand nothing.
const WORDS: [&str; 5] = ["$schema", "$defs", "title", "description", "$comment"];

impl Schema {
    /// Reads a schema.
    ///
    /// # Errors
    /// It is not JSON.
    pub fn new(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text).map(Self)
    }

    /// Checks `document`.
    ///
    /// # Errors
    /// The first thing that is wrong with the document, or with the schema.
    pub fn check(&self, document: &Json) -> Result<(), Broken> {
        self.value(&self.0, document, "")
    }

    fn value(&self, schema: &Json, value: &Json, at: &str) -> Result<(), Broken> {
        let schema = match schema {
            Json::Object(schema) => schema,
            Json::Bool(true) => return Ok(()),
            Json::Bool(false) => return Err(format!("{at}: is not allowed")),
            _ => return Err(format!("{at}: the schema itself is broken")),
        };
        for (keyword, demand) in schema {
            let kept = match (keyword.as_str(), value) {
                ("type", _) => words(demand).any(|name| is_type(value, name)),
                ("const", _) => value == demand,
                ("enum", _) => items(demand).contains(value),
                ("minimum", Json::Number(number)) => number.as_f64() >= demand.as_f64(),
                ("minItems", Json::Array(items)) => Some(items.len() as u64) >= demand.as_u64(),
                ("maxItems", Json::Array(items)) => Some(items.len() as u64) <= demand.as_u64(),
                ("required", Json::Object(fields)) => {
                    match words(demand).find(|name| !fields.contains_key(*name)) {
                        Some(name) => return Err(format!("{at}: {name} is missing")),
                        None => true,
                    }
                }
                ("$ref", _) => {
                    let to = demand.as_str().and_then(|to| self.0.pointer(to.strip_prefix('#')?));
                    let to = to.ok_or_else(|| format!("{at}: the schema has no {demand}"))?;
                    self.value(to, value, at)?;
                    true
                }
                ("anyOf", _) => items(demand).iter().any(|one| self.value(one, value, at).is_ok()),
                ("items", Json::Array(items)) => {
                    for (index, item) in items.iter().enumerate() {
                        self.value(demand, item, &format!("{at}/{index}"))?;
                    }
                    true
                }
                ("properties", Json::Object(fields)) => {
                    for (name, schema) in object(demand) {
                        if let Some(field) = fields.get(name) {
                            self.value(schema, field, &format!("{at}/{name}"))?;
                        }
                    }
                    true
                }
                ("additionalProperties", Json::Object(fields)) => {
                    let known = schema.get("properties").map(object);
                    for (name, field) in fields {
                        if !known.is_some_and(|known| known.contains_key(name)) {
                            self.value(demand, field, &format!("{at}/{name}"))?;
                        }
                    }
                    true
                }
                // These say nothing about values of other types.
                (
                    "minimum"
                    | "minItems"
                    | "maxItems"
                    | "required"
                    | "items"
                    | "properties"
                    | "additionalProperties",
                    _,
                ) => true,
                (word, _) if WORDS.contains(&word) => true,
                (word, _) => return Err(format!("{at}: {word} is a keyword unknown here")),
            };
            if !kept {
                return Err(format!("{at}: {value} breaks {keyword} {demand}"));
            }
        }
        Ok(())
    }
}

fn is_type(value: &Json, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

fn items(value: &Json) -> &[Json] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A word, or several.
fn words(value: &Json) -> impl Iterator<Item = &str> {
    items(value).iter().chain(value.is_string().then_some(value)).filter_map(Json::as_str)
}

fn object(value: &Json) -> &Map<String, Json> {
    static EMPTY: std::sync::LazyLock<Map<String, Json>> = std::sync::LazyLock::new(Map::new);
    value.as_object().unwrap_or(&EMPTY)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(schema: Json, value: Json) -> Result<(), Broken> {
        Schema(schema).check(&value)
    }

    #[test]
    fn each_keyword_keeps_out_what_it_should() {
        let cases = [
            (json!({"type": "integer"}), json!(1), json!(1.5)),
            (json!({"type": ["integer", "null"]}), json!(null), json!("1")),
            (json!({"const": 1}), json!(1), json!(2)),
            (json!({"enum": ["a", "b"]}), json!("b"), json!("c")),
            (json!({"minimum": 0}), json!(0), json!(-1)),
            (json!({"minItems": 2}), json!([1, 2]), json!([1])),
            (json!({"maxItems": 2}), json!([1, 2]), json!([1, 2, 3])),
            (json!({"required": ["a"]}), json!({"a": 1}), json!({"b": 1})),
            (json!({"anyOf": [{"const": 1}, {"const": 2}]}), json!(2), json!(3)),
            (json!({"items": {"type": "string"}}), json!(["a"]), json!(["a", 1])),
            (json!({"properties": {"a": {"const": 1}}}), json!({"b": 2}), json!({"a": 2})),
            (
                json!({"properties": {"a": true}, "additionalProperties": false}),
                json!({"a": 1}),
                json!({"a": 1, "b": 1}),
            ),
            (json!({"additionalProperties": {"const": 1}}), json!({"x": 1}), json!({"x": 2})),
            (json!({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}), json!(1), json!(2)),
        ];
        for (schema, good, bad) in cases {
            assert_eq!(check(schema.clone(), good.clone()), Ok(()), "{schema} {good}");
            assert!(check(schema.clone(), bad.clone()).is_err(), "{schema} {bad}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let schema = json!({"properties": {"a": {"items": {"type": "integer"}}}});
        let broken = check(schema, json!({"a": [1, "x"]})).unwrap_err();
        assert!(broken.starts_with("/a/1: "), "{broken}");
    }

    #[test]
    fn a_schema_that_asks_for_what_is_not_known_here_is_refused() {
        assert!(check(json!({"pattern": "x"}), json!("x")).is_err());
        assert!(check(json!({"$ref": "#/$defs/none"}), json!("x")).is_err());
        assert!(check(json!(1), json!(1)).is_err());
    }
}
