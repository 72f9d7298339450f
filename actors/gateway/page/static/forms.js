// The form of an answer: a schema, an expression, choices or a grammar, as fields of a request.

import { $, say } from "./dom.js";

const EXAMPLE = {
  type: "object",
  properties: { colour: { enum: ["red", "blue", "green"] }, several: { type: "boolean" } },
  required: ["colour", "several"],
  additionalProperties: false,
};

const FORMS = {
  json_schema: {
    label: "JSON schema",
    example: JSON.stringify(EXAMPLE, null, 2),
    fields: (text) => ({ response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } }),
  },
  regex: { label: "Regular expression", example: "(yes|no), [a-z ]{1,20}\\.", fields: (text) => ({ structured_outputs: { regex: text } }) },
  choice: { label: "Choices", example: "yes\nno", fields: (text) => ({ structured_outputs: { choice: text.split("\n").filter(Boolean) } }) },
  grammar: { label: "Lark grammar", example: 'start: "red" | "blue"', fields: (text) => ({ structured_outputs: { grammar: text } }) },
};

// Show the box that the chosen form needs, with an example as its placeholder.
export function watchForm(elements) {
  const check = () => elements.form_text.setCustomValidity(problem(elements));
  elements.form.addEventListener("change", () => {
    const form = FORMS[elements.form.value];
    $("form-box").hidden = !form;
    if (form) {
      say($("form-label"), form.label);
      elements.form_text.placeholder = form.example;
    }
    check();
  });
  elements.form_text.addEventListener("input", check);
}

function problem({ form, form_text: { value } }) {
  if (form.value !== "json_schema" || !value.trim()) return "";
  try {
    JSON.parse(value);
    return "";
  } catch (error) {
    return `not valid JSON: ${error.message}`;
  }
}

// The fields that the form adds to a request; an empty box counts as its example.
export function formFields({ form, form_text: text }) {
  if (form.value === "json_object") return { response_format: { type: "json_object" } };
  const chosen = FORMS[form.value];
  return chosen ? chosen.fields(text.value.trim() ? text.value : chosen.example) : {};
}
